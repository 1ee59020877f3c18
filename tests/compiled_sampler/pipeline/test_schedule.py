"""The schedule: which kernels serve which batches, and how much scratch a step takes."""

import pytest
import torch

from compiled_sampler.exact.triton import ENTRY_BYTES, LONGEST, SPARE, launch_class, list_capacity, list_stride
from compiled_sampler.lowering.compile_queue import PROCESSES_VARIABLE
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.pipeline.chunks import eagerly
from compiled_sampler.pipeline.schedule import (
    CHUNK_BYTES,
    chunk_rows,
    row_bytes,
    row_class,
    schedule_for,
    warmup_batches,
)
from tests.builders.inputs import modes_by_name
from tests.chunked import eager_scratch_of
from tests.tiers import tiers
from tools.bench.memory import scratch_bytes, step_bytes, steps

V = 1000


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("mode", ["greedy", "no_filter", "min_p", "top_k", "full"])
@pytest.mark.parametrize("sizes", [tuple(2**power for power in range(10)), (1,), (4, 16), tuple(range(8, 385, 8))])
def test_warming_up_takes_one_batch_of_every_schedule_that_may_come(mode, sizes, times, device):
    """And so of each form of hand-written kernels."""
    device, named = torch.device(device), modes_by_name(151_936)[mode]

    def forms(rows):
        schedule = schedule_for(named, rows, device)
        return row_class(rows, device), schedule, launch_class(rows) if schedule.launches else ()

    batches = warmup_batches(named, sizes, times, device)
    taken = [(forms(size), forms(rows)) for size, rows in batches]
    assert {(forms(size), forms(size * each)) for size in sizes for each in (1, times)} <= {*taken}
    assert row_class(2, device) in {row_class(rows, device) for _, rows in batches}  # of steps of several rows
    assert len({*taken}) == len(batches)


MODES = list(modes_by_name(1000))
LARGE = 151_936


@pytest.mark.parametrize("name", tiers(["no_filter"], MODES))
@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_a_step_in_eager_torch_holds_no_more_than_is_computed(name, backend, monkeypatch):
    """Also where its stages wait for their compiled forms."""
    monkeypatch.setattr(CompiledStages, "compiles_at_calls", False)
    monkeypatch.setenv(PROCESSES_VARIABLE, "0")
    vocab_size, rows, small = 2000, 96, 2**10
    mode, logits = modes_by_name(vocab_size)[name], torch.randn(rows, vocab_size)
    run = CompiledStages() if backend == "compiled" else eagerly
    between = rows * row_bytes(mode, triton=False, fused=True) if run.fuses else 0
    chunk = rows // 4 * row_bytes(mode, triton=False, fused=False)
    with eager_scratch_of(chunk):
        for step, _, work in steps(mode, logits, run, verifies=True):
            results = 4 * vocab_size * rows // 4 if step == "probs" else 0  # of a chunk, before they are copied
            assert scratch_bytes(work, logits.device) <= chunk + between + results + small * rows, step


@pytest.mark.parametrize("name", MODES)
def test_4096_rows_of_a_large_vocabulary_stay_below_a_gibibyte(name):
    mode = modes_by_name(LARGE)[name]
    assert step_bytes(mode, 4096, triton=True, fused=True) <= CHUNK_BYTES < 2**30
    assert 4096 * row_bytes(mode, triton=True, fused=True) <= 2**30
    assert step_bytes(mode, 4096, triton=False, fused=False) < 2**30


@pytest.mark.parametrize("vocab_size", [111, LARGE, 262_144])
@pytest.mark.parametrize("name", MODES)
def test_batches_of_usual_sizes_are_one_chunk_on_a_gpu(name, vocab_size):
    most = chunk_rows(modes_by_name(vocab_size)[name], triton=True, fused=True)
    assert most >= 1024
    assert most * vocab_size < 2**31


@pytest.mark.parametrize("name", MODES)
def test_a_chunk_has_a_row_at_least(name):
    assert chunk_rows(modes_by_name(2**22 - 1)[name], triton=False, fused=False) >= 1


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 111, LONGEST - 1, LONGEST, LONGEST + 1, LARGE])
def test_a_list_holds_no_more_than_the_row_or_the_longest_list(vocab_size):
    capacity, stride = list_capacity(vocab_size), list_stride(vocab_size)
    assert min(vocab_size, LONGEST) <= capacity <= min(vocab_size + 15, LONGEST)
    assert stride == capacity + (SPARE if vocab_size > LONGEST else 0)
    assert stride * ENTRY_BYTES % 16 == 0
