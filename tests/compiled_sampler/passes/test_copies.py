"""Copies that tell their block maxima: the tokens of a copy and a pass over it, in one kernel."""

from dataclasses import dataclass, replace

import pytest
import torch

from compiled_sampler import LogitEdit, Logprobs, Sampler, SamplingParams
from compiled_sampler.passes.maxima import customized_with_maxima, masked_with_maxima
from compiled_sampler.pipeline import edits as edits_module
from compiled_sampler.pipeline.chunks import without_kernels
from compiled_sampler.pipeline.edits import drawing_schedule
from compiled_sampler.pipeline.sample import edit_and_draw, sample_step
from compiled_sampler.pipeline.schedule import StepRun, schedule_for
from tests.builders.inputs import BASES, modes_by_name
from tests.builders.masks import masked_inputs, stages_watched, with_bias
from tests.builders.sampler import same
from tests.for_a_gpu import gpu_schedule
from tools.kernels.launches import FALLBACK, for_a_gpu, generated, listed

COPYING = ("greedy", "top_k_top_p[64]", "full")
COPIES = {"masked", "copied", "order_maxima"}


def told(schedule, rows):
    """The schedule with maxima of copies, by keys as in C++; and that of a GPU, by bits and with the tokens' names."""
    on_gpu = gpu_schedule(schedule.mode, rows)
    return tuple(replace(each, copies_with_maxima=True) for each in (schedule, on_gpu))


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "masks"),
    [
        (64, torch.float32, "both"),
        (128, torch.bfloat16, "token_bitmask"),
        (128, torch.float16, "allowed_token_ids"),
        (6400, torch.float32, "both"),
    ],
)
@pytest.mark.parametrize("name", COPYING)
def test_a_masked_copy_that_tells_its_maxima_draws_the_same(name, vocab_size, dtype, masks):
    with_masks, left = masked_inputs("greedy" if name == "greedy" else "top_k_top_p[64]", masks, vocab_size, dtype)
    for base in BASES:
        mode = modes_by_name(vocab_size, base)[name]
        wanted = sample_step(mode, left)
        usual = drawing_schedule(mode, with_masks.logits, with_masks.edits)
        assert not usual.copies_with_maxima  # in C++
        for schedule in told(usual, len(with_masks.logits)):
            seen = list[str]()
            made = edit_and_draw(StepRun(stages_watched(seen), schedule), with_masks)
            assert same(made, wanted)
            assert "masked_with_maxima" in seen
            assert not COPIES & {*seen}
    is_short = name == "greedy" and vocab_size < 6400  # whose largest logits may all be allowed
    assert is_short or not same(made, sample_step(mode, with_masks._replace(edits=None)))


@pytest.mark.parametrize("name", COPYING)
def test_a_copy_that_lists_are_written_into_tells_no_maxima(name):
    bare, _ = masked_inputs("greedy" if name == "greedy" else "top_k_top_p[64]", "both", 640)
    inputs, mode = with_bias(bare), modes_by_name(640)[name]
    wanted = sample_step(mode, inputs)
    for schedule in told(drawing_schedule(mode, inputs.logits, inputs.edits), len(inputs.logits)):
        seen = list[str]()
        assert same(edit_and_draw(StepRun(stages_watched(seen), schedule), inputs), wanted)
        assert "masked_with_maxima" not in seen
    assert not same(wanted, sample_step(mode, bare))


@pytest.mark.parametrize("vocab_size", [1, 63, 129, 1000])
def test_padded_rows_are_copied_first(vocab_size):
    assert not any(gpu_schedule(mode, 8).copies_with_maxima for mode in modes_by_name(vocab_size).values())


def test_modes_whose_first_pass_is_maxima_take_them_from_a_copy():
    modes = modes_by_name(151_936)
    assert {name for name in modes if gpu_schedule(modes[name], 8).copies_with_maxima} == {*COPYING}
    assert {name for name in modes if gpu_schedule(modes[name], 1).copies_with_maxima} == {*COPYING} - {"greedy"}


@dataclass(frozen=True)
class Lowered(LogitEdit):
    """Every third token is lowered."""

    def edit(self, x, ids, rows):
        return torch.where(ids % 3 == 0, x - 2.0, x)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("logprobs", [None, Logprobs(top=2, of="filtered", rank=True)])
@pytest.mark.parametrize("given", [{}, {"logit_bias": {3: 5.0}}, {"allowed_token_ids": [1, 3, 6, 9]}])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 20}, {"top_p": 0.9}, {"top_p": 0.9, "p_less": True}])
def test_edits_of_the_user_tell_the_maxima_behind_all_that_comes_before(params, given, logprobs, on_gpu, monkeypatch):
    logits, positions = torch.randn(3, 640, generator=torch.Generator().manual_seed(1)), torch.arange(3)
    sampler = Sampler(640, 3, backend="eager", edits=[Lowered()])
    extra = [{"extra_args": {"Lowered": {}}}, {"extra_args": {"Lowered": {}}}, {}]
    slots = [sampler.add_request(SamplingParams(seed=n, **params, **given, **each)) for n, each in enumerate(extra)]
    plan = sampler.plan(slots)
    wanted = sampler.sample(plan, logits, positions, logprobs=logprobs)
    without = sampler.sample(sampler.plan([slots[2]] * 3), logits, positions)
    calls = []

    def with_maxima(*key, **static):
        return told(schedule_for(*key, **static), key[1])[on_gpu]

    monkeypatch.setattr(sampler._runner._executor, "_run", without_kernels)  # which a GPU's schedule launches
    monkeypatch.setattr(edits_module, "schedule_for", with_maxima)
    monkeypatch.setattr(
        edits_module, "customized_with_maxima", lambda *a, **k: calls.append(1) or customized_with_maxima(*a, **k)
    )
    made = sampler.sample(plan, logits, positions, logprobs=logprobs)
    assert torch.equal(made.token_ids, wanted.token_ids)
    assert torch.equal(made.status, wanted.status)
    if logprobs is not None:
        assert all(torch.equal(a, b) for a, b in zip(made.logprobs, wanted.logprobs, strict=True) if a is not None)
    assert len(calls) == ("p_less" not in params)  # a filter of whole rows makes the last copy
    assert given or not torch.equal(made.token_ids, without.token_ids)


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("stage", [masked_with_maxima, customized_with_maxima])
def test_the_copy_and_its_maxima_are_one_kernel(stage, names):
    with_masks, _ = masked_inputs("top_k_top_p[64]", "both", 640)
    static = {**gpu_schedule(modes_by_name(640)["full"], len(with_masks.logits)).copied.reduction, "names": names}
    (words, slots), allowed = (with_masks.edits.token_bitmask, with_masks.slots), with_masks.edits.tables.allowed
    given: tuple = words, slots, allowed
    if stage is customized_with_maxima:
        sampler = Sampler(640, 5, backend="eager", edits=[Lowered()])
        of_user = sampler._edits.inputs(("Lowered",), {}, None)
        static["edits"] = of_user.custom
        given = words, slots, with_masks.positions, allowed, of_user.tables.custom, (), None
    with for_a_gpu():
        code = generated(lambda run: run(stage, with_masks.logits, *given, **static), "triton")
    found = listed(code)
    assert [each.kind == FALLBACK for each in found] == [False]
    assert found[0].launches == 1
