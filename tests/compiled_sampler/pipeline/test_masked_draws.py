"""Draws that read masks beside the logits: the tokens, status and logprobs of a copy with -inf, without the copy."""

from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from compiled_sampler import LogitEdit, RowStatus, Sampler, SamplingParams
from compiled_sampler.batch import VerifyInputs
from compiled_sampler.core.rows import row_slots_of
from compiled_sampler.core.stage import Run, call
from compiled_sampler.edits.masks import MaskedLogits
from compiled_sampler.edits.names import RESTORE
from compiled_sampler.edits.tables import EditInputs, EditTables
from compiled_sampler.logprobs import LogprobInputs, Logprobs
from compiled_sampler.lowering.compiled_stages import CompiledStages, _shapes_of
from compiled_sampler.lowering.stage_code import StageCode
from compiled_sampler.lowering.tuning import is_hand_written
from compiled_sampler.modes import verifying
from compiled_sampler.passes import bounds
from compiled_sampler.passes.candidates import STORED_BLOCK
from compiled_sampler.passes.maxima import customized_with_maxima, masked_with_maxima, order_maxima
from compiled_sampler.pipeline import edits as edits_module
from compiled_sampler.pipeline.chunks import without_kernels
from compiled_sampler.pipeline.edits import drawing_schedule, edited_logits, logits_to_draw_from
from compiled_sampler.pipeline.sample import edit_and_draw, sample_step
from compiled_sampler.pipeline.schedule import StepRun, schedule_for
from compiled_sampler.pipeline.verify import verify_step
from tests.builders.filters import same_bits
from tests.builders.inputs import BASES, modes_by_name
from tests.builders.logprobs import EVERYTHING
from tests.builders.masks import MASKED_MODES, MASKS, masked_inputs, stages_watched, with_bias
from tests.builders.sampler import same
from tests.chunked import chunks_of
from tests.for_a_gpu import gpu_schedule, schedule_by_bounds
from tests.tiers import tiers
from tools.kernels.launches import FALLBACK, for_a_gpu, generated, listed

CASES = [
    (1, torch.float32, "both"),
    (2, torch.bfloat16, "allowed_token_ids"),
    (127, torch.float16, "token_bitmask"),
    *((129, torch.float32, masks) for masks in MASKS),
    (1000, torch.bfloat16, "both"),
]
"""V, dtype and masks: each once."""
SEARCHING = ("top_k", "full")
COPYING = ("greedy", "top_k_top_p[64]", "full")
"""Modes whose first pass finds maxima, which a copy may tell."""


def schedule_of(mode, inputs):
    """The schedule that a GPU follows, which reads masks."""
    with for_a_gpu():
        made = drawing_schedule(mode, inputs.logits, inputs.edits)
    assert made.reads_masks == (inputs.edits is not None)
    return made


def told(schedule, rows):
    """The schedule with maxima of copies, by keys as in C++; and that of a GPU, by bits and with the tokens' names."""
    return [replace(each, copies_with_maxima=True) for each in (schedule, gpu_schedule(schedule.mode, rows))]


def drawn(schedule, inputs, run=without_kernels):
    return edit_and_draw(StepRun(run, schedule), inputs)


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "masks"),
    [*CASES, (64, torch.float32, "both"), (128, torch.float16, "token_bitmask"), (6400, torch.bfloat16, "both")],
)
@pytest.mark.parametrize("name", MASKED_MODES)
def test_a_mask_that_is_read_and_one_whose_copy_tells_its_maxima_draw_what_a_masked_copy_draws(
    name, vocab_size, dtype, masks
):
    with_masks, left = masked_inputs(name, masks, vocab_size, dtype)
    for base in BASES:
        mode = modes_by_name(vocab_size, base)[name]
        wanted, usual = sample_step(mode, left), drawing_schedule(mode, with_masks.logits, with_masks.edits)
        tells = name in COPYING and vocab_size % STORED_BLOCK == 0
        for schedule in (schedule_of(mode, with_masks), *(told(usual, len(left.logits)) if tells else ()), usual):
            seen = list[str]()
            assert same(edit_and_draw(StepRun(stages_watched(seen), schedule), with_masks), wanted)
            assert ("masked" in seen) == (schedule is usual)
            is_told = schedule.copies_with_maxima and not schedule.reads_masks
            assert ("masked_with_maxima" in seen) == is_told
            assert not (is_told and "order_maxima" in seen)
            assert "copied" not in seen
    assert vocab_size < 127 or not same(wanted, sample_step(mode, with_masks._replace(edits=None)))


@pytest.mark.parametrize(("vocab_size", "dtype", "masks"), [*CASES, (5000, torch.float32, "both")])
@pytest.mark.parametrize("name", ["no_filter", "min_p"])
def test_a_race_by_bounds_draws_what_it_draws_of_a_masked_copy(name, vocab_size, dtype, masks, monkeypatch):
    """Also where one block is looked at, so that most rows race over all their tokens, and in slices of two words."""
    with_masks, left = masked_inputs(name, masks, vocab_size, dtype)
    with_masks = with_masks._replace(logits=torch.where(with_masks.logits.isnan(), torch.nan, with_masks.logits))
    mode = modes_by_name(vocab_size)[name]
    wanted, rows = sample_step(mode, left), len(left.logits)
    for block, leaders, width in ((512, 4, 32), (256, 1, 64)):
        monkeypatch.setattr(bounds, "LEADERS", leaders)
        monkeypatch.setattr(bounds, "_MASKED_SLICE", width)
        bounded = replace(schedule_by_bounds(mode, rows, block), reads_masks=True)
        assert same(drawn(bounded, with_masks), wanted)
    bare = replace(bounded, reads_masks=False)
    assert vocab_size < 127 or not same(drawn(bare, with_masks._replace(edits=None)), wanted)


def test_a_search_for_logprobs_reads_a_copy():
    with_masks, _ = masked_inputs("no_filter", "both", 129)
    modes, given = modes_by_name(129), (with_masks.logits, with_masks.edits)
    with for_a_gpu():
        for of_kept in (*EVERYTHING, Logprobs(of="filtered"), Logprobs(num_kept=True), Logprobs(boundary=True)):
            for name, mode in modes.items():
                made = drawing_schedule(mode, *given, LogprobInputs(of_kept))
                assert made.reads_masks == (name not in SEARCHING)
        for of_all in (None, Logprobs(), Logprobs(top=5, of="processed", rank=True, entropy=True)):
            wanted = None if of_all is None else LogprobInputs(of_all)
            assert all(drawing_schedule(mode, *given, wanted).reads_masks for mode in modes.values())


def test_masks_beside_other_edits_stand_in_their_copy():
    with_masks, _ = masked_inputs("greedy", "both", 129)
    mode, tables = modes_by_name(129)["greedy"], with_masks.edits.tables
    with for_a_gpu():
        assert drawing_schedule(mode, with_masks.logits, with_masks.edits).reads_masks
        for field in ({"lists": (None,)}, {"filters": ()}):
            other = with_masks.edits._replace(tables=tables._replace(**field))
            assert not drawing_schedule(mode, with_masks.logits, other).reads_masks
        custom = with_masks.edits._replace(custom=())
        assert not drawing_schedule(mode, with_masks.logits, custom).reads_masks
        assert not drawing_schedule(mode, with_masks.logits, EditInputs(EditTables())).reads_masks
    assert not drawing_schedule(mode, with_masks.logits, with_masks.edits).reads_masks  # in C++


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("name", ["greedy", "min_p", "full"])
def test_lists_that_may_write_into_the_logits_leave_masks_beside_them(name, masks):
    bare, _ = masked_inputs(name, masks, 129)
    mode, seen = modes_by_name(129)[name], list[str]()
    consumed, kept = with_bias(bare, True), with_bias(bare, False)
    made = drawn(schedule_of(mode, consumed), consumed, stages_watched(seen))
    assert not {"masked", "copied"} & {*seen}
    assert not torch.equal(consumed.logits, bare.logits)
    assert same(made, sample_step(mode, kept))
    assert same_bits(kept.logits, bare.logits)
    assert not same(made, sample_step(mode, bare))
    with for_a_gpu():
        halves = consumed.logits.to(torch.bfloat16)
        assert not drawing_schedule(mode, halves, consumed.edits).reads_masks
        assert not drawing_schedule(mode, kept.logits, kept.edits).reads_masks
        assert not drawing_schedule(mode, kept.logits, consumed.edits._replace(custom=())).reads_masks


def test_lists_that_may_write_into_the_logits_come_before_the_copy_with_masks():
    """As for logprobs of what a search keeps; its pass then tells the maxima, so that the copy is read once less."""
    bare, _ = masked_inputs("no_filter", "both", 128)
    consumed, kept = with_bias(bare, True), with_bias(bare, False)
    mode, seen = modes_by_name(128)["full"], list[str]()
    with for_a_gpu():
        schedule = drawing_schedule(mode, consumed.logits, consumed.edits, LogprobInputs(Logprobs(of="filtered")))
    run = StepRun(stages_watched(seen), schedule)
    edited = logits_to_draw_from(run, consumed.logits, row_slots_of(consumed), consumed.edits, ExitStack())
    assert seen.index("write_biases") < seen.index("masked_with_maxima")
    assert isinstance(edited.logits, Tensor)
    assert same_bits(edited.logits, edited_logits(StepRun(call, schedule), kept.logits, row_slots_of(kept), kept.edits))
    assert edited.maxima is not None
    assert not same_bits(consumed.logits, bare.logits)
    restored = with_bias(bare, RESTORE)
    assert same(sample_step(mode, restored), sample_step(mode, kept))
    assert same_bits(restored.logits, bare.logits)


@pytest.mark.parametrize("name", MASKED_MODES)
def test_chunks_of_rows_read_their_own_masks(name):
    with_masks, left = masked_inputs(name, "both", 129)
    mode = modes_by_name(129, "all")[name]
    with chunks_of(5), for_a_gpu():
        assert same(sample_step(mode, with_masks, without_kernels), sample_step(mode, left, without_kernels))


@pytest.mark.parametrize("name", MASKED_MODES)
def test_verification_by_match_reads_masks_and_other_rules_copy(name):
    with_masks, left = masked_inputs(name, "both", 129)
    counts, drafts = torch.full((4,), 2), torch.randint(-1, 129, (4, 2))
    rest = torch.tensor([0, 1, -1, 3]), torch.arange(4) + 5, counts, drafts, None, with_masks.table
    for rule in ("match", "rejection", "block"):
        mode, seen = verifying(modes_by_name(129)[name], rule), list[str]()
        edited, plain = (VerifyInputs(each.logits, *rest) for each in (with_masks, left))
        edited = edited._replace(edits=EditInputs(EditTables(), with_masks.edits.token_bitmask))
        with for_a_gpu():
            made = verify_step(mode, edited, stages_watched(seen))
        assert same(made, verify_step(mode, edited))
        assert ("masked" in seen) == (rule != "match" and name != "greedy")
        assert not same(made, verify_step(mode, plain._replace(logits=with_masks.logits)))


def test_what_a_mask_hides_sets_no_status():
    """A masked NaN or infinity is not seen; one that is not masked is."""
    logits = torch.zeros(4, 64)
    logits[:, 3], logits[:, 40], logits[:, 5] = torch.nan, torch.inf, 1.0
    no_nan, no_infinity = ~(1 << 3), ~(1 << 8)
    words = [[no_nan, no_infinity], [no_nan, -1], [-1, no_infinity], [0, 0]]
    with_masks, _ = masked_inputs("greedy", "token_bitmask", 64)
    inputs = with_masks._replace(
        logits=logits,
        slots=torch.zeros(4, dtype=torch.int64),
        positions=torch.zeros(4, dtype=torch.int64),
        edits=EditInputs(EditTables(), torch.tensor(words, dtype=torch.int32)),
    )
    made = drawn(schedule_of(modes_by_name(64)["greedy"], inputs), inputs)
    assert made.token_ids.tolist() == [5, 40, 5, -1]
    wanted = [0, RowStatus.POSITIVE_INFINITY, RowStatus.NAN_SEEN, RowStatus.ALL_MASKED]
    assert made.status.tolist() == wanted


@pytest.mark.parametrize("name", tiers(["min_p"], MASKED_MODES))
def test_compiled_stages_read_masks_as_eager_torch_does(name):
    with_masks, left = masked_inputs(name, "both", 129, copies=4)
    mode, stages = modes_by_name(129)[name], CompiledStages()

    def run(stage, /, *tensors, **static):
        return (without_kernels if is_hand_written(stage) else stages)(stage, *tensors, **static)

    made = drawn(schedule_of(mode, with_masks), with_masks, Run(run, fuses=True))
    assert same(made, sample_step(mode, left))


def test_calls_with_other_masks_are_compiled_apart():
    found = [masked_inputs("greedy", masks, 129)[0] for masks in MASKS]
    calls = [MaskedLogits(x.logits, x.edits.token_bitmask, x.slots, x.edits.tables.allowed) for x in found]
    static = {"vocab_size": 129, "block": 64}
    several = [(each,) for each in (found[0].logits, *calls)]
    assert len({_shapes_of(order_maxima, each, static) for each in several}) == 4
    assert len({StageCode.of(order_maxima, each, static).key for each in several}) == 4


# Copies that tell their block maxima: the tokens of a copy and a pass over it, in one kernel.


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
