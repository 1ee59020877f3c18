"""Scratch of a step: what it holds at its peak is below what the schedule allows for, however many the rows."""

import itertools

import pytest
import torch

from compiled_sampler.core.stage import call
from compiled_sampler.exact.triton import ENTRY_BYTES, LONGEST, SPARE, list_capacity, list_stride
from compiled_sampler.modes import mode_table
from compiled_sampler.pipeline.schedule import CHUNK_BYTES, chunk_rows, row_bytes, step_bytes
from tests.builders.inputs import modes_by_name
from tests.chunked import chunks_of
from tests.tiers import tiers
from tools.bench.memory import scratch_bytes, steps

MODES = list(modes_by_name(1000))
LARGE = 151_936


@pytest.mark.parametrize("name", tiers(["no_filter"], MODES))
def test_a_step_in_eager_torch_holds_no_more_than_is_computed(name):
    vocab_size, rows, small = 2000, 96, 2**10
    mode, logits = modes_by_name(vocab_size)[name], torch.randn(rows, vocab_size)
    allowed = rows * row_bytes(mode, triton=False, fused=False)
    for step, _, work in steps(mode, logits, call, verifies=True):
        assert scratch_bytes(work, logits.device) <= allowed, step
    with chunks_of(rows // 4):
        for step, _, work in steps(mode, logits, call, verifies=True):
            results = 4 * vocab_size * rows // 4 if step == "probs" else 0  # of a chunk, before they are copied
            assert scratch_bytes(work, logits.device) <= allowed // 4 + results + small * rows, step


@pytest.mark.parametrize("name", MODES)
def test_4096_rows_of_a_large_vocabulary_stay_below_a_gibibyte(name):
    mode = modes_by_name(LARGE)[name]
    assert step_bytes(mode, 4096, triton=True, fused=True) <= CHUNK_BYTES < 2**30
    assert 4096 * row_bytes(mode, triton=True, fused=True) <= 2**30
    assert step_bytes(mode, 4096, triton=False, fused=False) < 2**30


@pytest.mark.parametrize(("name", "vocab_size"), list(itertools.product(MODES, [111, 32_768, LARGE, 262_144])))
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
