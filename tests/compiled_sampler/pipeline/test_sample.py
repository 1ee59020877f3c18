"""A whole step: what it does not read, its flags, and both bases of top-p on every backend.

That every mode draws the oracle's tokens, of hard rows too, is in ``core/test_reference.py``.
"""

import functools
import math

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.pipeline.sample import sample_step
from tests.builders.inputs import modes_by_name, sample_inputs
from tests.builders.sampler import SHARED_SLOTS, V, same


@pytest.mark.parametrize("poison", [math.inf, math.nan, 1e30, -math.inf])
@pytest.mark.parametrize("name", list(modes_by_name(600)))
def test_padding_columns_are_never_read(name, poison, generator):
    clean = torch.randn(3, 600, generator=generator)
    padded = torch.cat((clean, torch.full((3, 40), poison)), 1)
    params = [SamplingParams(seed=1, top_k=k) for k in (1, 5, 64)]
    mode = modes_by_name(600)[name]
    inputs = sample_inputs(clean, params)
    wide = inputs._replace(logits=padded)
    assert same(sample_step(mode, wide), sample_step(mode, inputs))
    assert torch.equal(probability_step(mode, wide).probabilities, probability_step(mode, inputs).probabilities)


TOP_P = {
    "narrow": SamplingParams(temperature=1.1, top_k=20, top_p=0.6, seed=1),
    "wide": SamplingParams(temperature=1.3, top_k=90, top_p=0.7, seed=2),
    "top_p": SamplingParams(temperature=1.5, top_p=0.8, min_p=1e-3, seed=3),
}
ONE_OF_EACH = {
    base: (("eager", base, "cpu"), ("eager", base, "cuda"), ("compiled", base, "cuda")) for base in ("all", "top_k")
}


@functools.cache
def sampler_of(backend: str, base: str = "all", device: str = "cpu", vocab_size: int = V) -> Sampler:
    made = Sampler(vocab_size, SHARED_SLOTS, device, backend=backend, top_p_base=base)
    for params in TOP_P.values():
        made.add_request(params)
    return made


def logits_of(rows: int, vocab_size: int = V) -> Tensor:
    return 2.0 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1))


def test_compiled_draws_by_the_base_of_whole_rows_are_those_of_eager_torch():
    slots, positions = [0, 1, 2] * 4, torch.arange(12)
    eager, compiled = (
        each.sample(each.plan(slots, "full"), logits_of(12), positions)
        for each in map(sampler_of, ("eager", "compiled"))
    )
    assert same(eager, compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("base", ["all", "top_k"])
@pytest.mark.parametrize("vocab_size", [5000, 70_000])
@pytest.mark.parametrize("rows", [1, 16, 40, 300])
def test_by_either_base_few_rows_and_many_are_on_cuda_those_of_the_cpu(rows, vocab_size, base):
    logits, positions = logits_of(rows, vocab_size), torch.arange(rows)
    slots = [row % len(TOP_P) for row in range(rows)]
    cpu, *others = (sampler_of(*kind, vocab_size) for kind in ONE_OF_EACH[base])
    for picked, mode in ((slots, "full"), ([0] * rows, "top_k_top_p[64]")):
        wanted = cpu.sample(cpu.plan(picked, mode), logits, positions)
        for each in others:
            made = each.sample(each.plan(picked, mode), logits.cuda(), positions.cuda())
            assert same(made, wanted)
