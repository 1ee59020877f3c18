"""Logprobs have the same bits compiled, and on a GPU, as in eager torch on the CPU."""

import math

import pytest
import torch

from compiled_sampler.batch import SampleInputs
from compiled_sampler.core.stage import call
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import mode_table
from compiled_sampler.pipeline.sample import sample_step
from tests.builders.inputs import modes_by_name, slot_table
from tests.builders.logprobs import EVERYTHING, differing, logprobs, on_device, processed_scale
from tests.cases.hard_rows import mixed_batch, mixed_requests
from tests.tiers import tiers

V = 129
RAW, PROCESSED, FILTERED = EVERYTHING
CASES = [*((each.name, FILTERED) for each in mode_table(V, "top_k")), ("greedy", RAW), ("no_filter", PROCESSED)]


@pytest.fixture(scope="module")
def compiled() -> CompiledStages:
    """The stages, compiled once for all tests here."""
    return CompiledStages()


def batch(mode: str, base: str, rows: int, dtype: torch.dtype, vocab_size: int = V):
    """Hard rows with padding, the tokens that are drawn, edited logits and scales."""
    requests = mixed_requests(vocab_size, 60, seed=1)
    drawn = mixed_batch(requests, modes_by_name(vocab_size, base)[mode], rows, dtype, seed=4)
    slots = drawn.slots.clone()
    slots[3::17] = -1
    inputs = SampleInputs(drawn.logits, slots, drawn.positions, slot_table(requests, vocab_size))
    edited = drawn.logits.float() + torch.linspace(-1.0, 1.0, vocab_size)
    edited[:, ::5] = -math.inf
    tokens = sample_step(modes_by_name(vocab_size, base)[mode], inputs).token_ids
    return inputs, tokens, edited, processed_scale(requests)


def faults(mode, base, wanted, run, device, given) -> list[str]:
    """Fields that differ from eager torch on the CPU."""
    inputs, tokens, edited, scale = given
    chosen = modes_by_name(edited.shape[1], base)[mode]
    right = logprobs(chosen, inputs, tokens, wanted, edited=edited, scale=scale)
    inputs, tokens, edited, scale = on_device(given, device)
    return differing(right, logprobs(chosen, inputs, tokens, wanted, run, edited=edited, scale=scale))


@pytest.mark.parametrize("base", tiers(["top_k"], ["top_k", "all"]))
@pytest.mark.parametrize(
    ("mode", "wanted"),
    tiers([("full", FILTERED)], CASES),
    ids=lambda each: getattr(each, "of", each),
)
def test_compiled_hard_rows_have_the_bits_of_eager_torch(mode, wanted, base, device, compiled):
    assert faults(mode, base, wanted, compiled, device, batch(mode, base, 400, torch.float32)) == []


@pytest.mark.parametrize("seed", tiers([0], range(4)))
def test_a_compiled_row_alone_has_the_bits_of_eager_torch(seed, device, compiled):
    inputs, tokens, edited, scale = batch("full", "top_k", 40, torch.float32)
    rows = slice(10 * seed, 10 * seed + 1)
    alone = SampleInputs(*(each[rows] for each in inputs[:3]), inputs.table), tokens[rows], edited[rows], scale
    assert faults("full", "top_k", FILTERED, compiled, device, alone) == []


@pytest.mark.parametrize("dtype", tiers([], [torch.bfloat16, torch.float16]))
def test_compiled_short_floats_have_the_bits_of_eager_torch(dtype, device, compiled):
    wanted = Logprobs(of="processed", top=2, rank=True, entropy=True)
    assert faults("no_filter", "top_k", wanted, compiled, device, batch("no_filter", "top_k", 100, dtype)) == []


@pytest.mark.full
def test_compiled_long_tops_have_the_bits_of_eager_torch(device, compiled):
    wanted = Logprobs(top=100)
    given = batch("no_filter", "top_k", 100, torch.float32)
    assert faults("no_filter", "top_k", wanted, compiled, device, given) == []


@pytest.mark.parametrize("vocab_size", tiers([], [1, 2, 127]))
def test_compiled_short_rows_have_the_bits_of_eager_torch(vocab_size, device, compiled):
    wanted = Logprobs(of="filtered", top=3, boundary=True, num_kept=True, entropy=True)
    given = batch("full", "top_k", 40, torch.float32, vocab_size)
    assert faults("full", "top_k", wanted, compiled, device, given) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "wanted"), CASES, ids=lambda each: getattr(each, "of", each))
def test_eager_on_a_gpu_has_the_bits_of_the_cpu(mode, wanted):
    given = batch(mode, "top_k", 400, torch.float32)
    assert faults(mode, "top_k", wanted, call, torch.device("cuda"), given) == []
