"""The code of a stage: what it depends on, calls of it elsewhere, what stands in for it, and where it is refused."""

import inspect
import pickle
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams, Verification
from compiled_sampler.batch import DraftTable
from compiled_sampler.core.stage import Run, call
from compiled_sampler.lowering.comparison import difference
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.lowering.layouts import TensorSpec, leaves, shape
from compiled_sampler.lowering.stage_code import EXACT_OPTIONS, StageCode
from compiled_sampler.passes.maxima import order_maxima
from tests.builders.edits import OF_EDIT
from tests.builders.sampler import nothing_compiles


def test_the_error_inside_a_capture_names_all_that_a_warm_up_can_be_told():
    code = StageCode(order_maxima, (), {}, 1, torch.device("cuda"), ())
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        pytest.raises(RuntimeError, match="order_maxima was not compiled for such a call before the capture") as caught,
    ):
        code.check_not_capturing()
    named = {*re.findall(r"\w+", str(caught.value))}
    steps = {"verifications", "probabilities", "captured_edits", "captured_logprobs", "buckets"}
    assert steps <= named & {*inspect.signature(Sampler).parameters}
    assert "logits" in named & {*inspect.signature(Sampler.bind).parameters}


def test_a_file_system_that_fails_for_a_moment_has_no_stage():
    code = StageCode.of(order_maxima, (torch.zeros(3, 70),), {"vocab_size": 70, "block": 64})
    with mock.patch.object(Path, "exists", side_effect=OSError("stale file handle")):
        assert not code.is_on_disk(EXACT_OPTIONS)


V, ROWS, WIDTH = 129, 3, 2
EVERY_EDIT = {name: value for given in OF_EDIT.values() for name, value in given.items()} | {"watermark_tokens": 2}
LAWS = [{"temperature": 0.0}, {}, {"top_p": 0.9}, EVERY_EDIT]


def places_of(max_num_requests, buckets):
    """Where the stages are kept that a sampler calls in draws, drafts and verifications."""
    ways = [Verification("rejection", WIDTH, "cache"), Verification("match", WIDTH)]
    options = {"history_len": 48, "draft_cache_len": WIDTH, "verifications": ways, "buckets": buckets}
    sampler, places = Sampler(V, max_num_requests, backend="eager", **options), set()

    def noted(stage, /, *tensors, **static):
        place = StageCode.of(stage, tensors, static).path(EXACT_OPTIONS)
        assert place is not None
        places.add(place)
        return call(stage, *tensors, **static)

    sampler._runner._executor._run = Run(noted, fuses=True)
    positions, noise = torch.full((ROWS,), 2), torch.Generator().manual_seed(1)
    for law in LAWS:
        slot = sampler.add_request(SamplingParams(seed=1, **law), [1, 2])
        slots = [slot, -1, -1]
        sampler.sample(sampler.plan(slots), torch.randn(ROWS, V, generator=noise), positions)
        plan = sampler.plan(slots, num_drafts=[WIDTH, 0, 0])
        drafts = torch.randint(V, (ROWS, WIDTH), generator=noise)
        sampler.verify(plan, torch.randn(WIDTH + ROWS, V, generator=noise), drafts, positions, "match")
        if "watermark_tokens" not in law:  # whose drafts have other noise
            drafts = [
                sampler.draft(sampler.plan(slots), torch.randn(ROWS, V), positions, offset=n, coupled=False)
                for n in (0, 1)
            ]
            sampler.verify(plan, torch.randn(WIDTH + ROWS, V, generator=noise), drafts, positions, "rejection")
        sampler.remove_request(slot)
    return places


def test_no_stage_depends_on_how_many_requests_a_sampler_holds_nor_on_its_buckets():
    places = places_of(5, [4])
    assert len(places) > 40
    assert places_of(1, [1]) == places
    assert places_of(300, [1, 8, 256]) == places


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 5),
        torch.zeros(7, 9)[1:4, 2:5],
        torch.zeros(0, 4),
        torch.zeros(40, dtype=torch.int32)[5:],
        torch.zeros(()),
    ],
)
def test_a_spec_is_everything_but_the_numbers(tensor):
    made = TensorSpec.of(tensor).made()
    assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert made.storage_offset() % 16 == tensor.storage_offset() % 16
    assert made.untyped_storage().nbytes() == 0


def test_tables_stay_where_they_are_and_go_to_other_processes_without_their_memory():
    table = DraftTable(torch.zeros(5, 2, 7))
    code = StageCode.of(order_maxima, (table, torch.randn(3, 129)), {"vocab_size": 129, "block": 64})
    kept, x = code.without_numbers().made_tensors()
    assert kept.logits is table.logits
    assert (x.shape, x.untyped_storage().nbytes()) == ((3, 129), 0)
    sent = pickle.loads(pickle.dumps(code.portable()))
    assert sent.key == code.key
    assert sent.path(EXACT_OPTIONS) == code.path(EXACT_OPTIONS)
    kept, _ = sent.made_tensors()
    assert isinstance(kept, DraftTable)
    assert (kept.logits.shape, kept.logits.untyped_storage().nbytes()) == ((5, 2, 7), 0)


def halves(x):
    return x[:, ::2] + 1, None, (x > 0).sum(-1)


def doubled(x):
    return x.T * 2


def test_listed_stages_give_zeros_laid_out_as_their_results_and_compile_no_more_afterwards():
    run, x = CompiledStages(), torch.randn(3, 6)
    with run.precompiling(x.device):
        listed = run(halves, x)
        run(doubled, listed[0])
    assert not listed[0].any()
    assert not listed[2].any()
    with nothing_compiles():
        found = run(halves, x)
        assert torch.equal(run(doubled, found[0]), doubled(found[0]))
    assert difference(found, halves(x)) == ""
    assert [*map(shape, leaves(listed))] == [*map(shape, leaves(found))]
