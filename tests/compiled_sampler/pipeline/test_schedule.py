"""The schedule: which kernels serve which batches, and how much scratch a step takes."""

import pytest
import torch

from compiled_sampler.exact.triton import ENTRY_BYTES, LONGEST, SPARE, launch_class, list_capacity, list_stride
from compiled_sampler.lowering.compile_queue import PROCESSES_VARIABLE
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import mode_table
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
from tests.for_a_gpu import gpu_schedule
from tests.tiers import tiers
from tools.bench.memory import scratch_bytes, step_bytes, steps

V = 1000


@pytest.mark.parametrize(
    ("mode", "sizes", "times", "vocab_size", "device", "expected"),
    [
        ("full", (1, 4, 32), 1, V, "cuda", [(1, 1), (32, 32), (4, 4)]),
        ("full", (1, 4, 32), 4, V, "cuda", [(1, 4), (1, 1), (32, 128), (32, 32), (4, 16)]),
        ("full", (1,), 1, V, "cpu", [(1, 1), (128, 128)]),
        ("greedy", (1, 4, 32, 100), 1, V, "cuda", [(1, 1), (32, 32), (128, 128)]),
        (
            "full",
            (1, 32, 50, 256, 512),
            1,
            2**15,
            "cuda",
            [(1, 1), (32, 32), (128, 128), (50, 50), (256, 256), (512, 512)],
        ),
        ("no_filter", (1, 32, 50, 256, 512), 1, 2**15, "cuda", [(1, 1), (32, 32), (128, 128), (512, 512)]),
    ],
)
def test_warming_up_takes_a_batch_of_every_schedule_that_may_come(mode, sizes, times, vocab_size, device, expected):
    assert warmup_batches(modes_by_name(vocab_size)[mode], sizes, times, torch.device(device)) == expected


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("mode", ["no_filter", "min_p", "top_k", "full"])
@pytest.mark.parametrize("sizes", [tuple(2**power for power in range(10)), (4, 16), tuple(range(8, 385, 8))], ids=str)
def test_warming_up_runs_each_form_of_hand_written_kernels_that_a_bucket_needs(mode, sizes, times):
    device, named = torch.device("cuda"), modes_by_name(151_936)[mode]
    batches = warmup_batches(named, sizes, times, device)

    def forms(rows):
        launches = schedule_for(named, rows, device).launches
        return launches and (row_class(rows, device), launches, launch_class(rows))

    warm = {forms(rows) for _, rows in batches}
    assert {forms(size * each) for size in sizes for each in (1, times)} <= warm


@pytest.mark.parametrize(
    ("rows", "vocab_size", "plain", "with_min_p"),
    [
        (16, 2**21, False, False),
        (65, 2**15, False, True),
        (33, 2**18 - 2**13, False, True),
        (33, 2**18, True, True),
        (257, 2**15, True, True),
    ],
)
def test_races_of_many_rows_and_many_logits_are_bounded(rows, vocab_size, plain, with_min_p):
    for name, bounded in (("no_filter", plain), ("min_p", with_min_p)):
        mode = modes_by_name(vocab_size)[name]
        assert gpu_schedule(mode, rows).races_by_bounds == bounded
        assert not schedule_for(mode, rows, torch.device("cpu")).races_by_bounds


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


def test_a_chunk_has_a_row_at_least():
    for mode in mode_table(2**22 - 1, "top_k"):
        assert chunk_rows(mode, triton=False, fused=False) >= 1


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 111, LONGEST - 1, LONGEST, LONGEST + 1, LARGE])
def test_a_list_holds_no_more_than_the_row_or_the_longest_list(vocab_size):
    capacity, stride = list_capacity(vocab_size), list_stride(vocab_size)
    assert min(vocab_size, LONGEST) <= capacity <= min(vocab_size + 15, LONGEST)
    assert stride == capacity + (SPARE if vocab_size > LONGEST else 0)
    assert stride * ENTRY_BYTES % 16 == 0
