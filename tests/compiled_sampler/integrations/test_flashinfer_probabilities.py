"""Rows of probabilities: their logarithms keep the order, their sums are integers, and rows get seeds of their own."""

import math

import torch

from compiled_sampler.core.noise import philox_4x32_10
from compiled_sampler.integrations.flashinfer import base_2_logits, keep_first, keep_nucleus, renormalised
from compiled_sampler.integrations.flashinfer_noise import seeds_of_rows


def test_logarithms_are_rounded_once_and_keep_the_order(generator):
    p = torch.rand(1, 100_000, generator=generator).pow(4).sort(-1).values
    logits = base_2_logits(p)
    assert (logits.diff() >= 0).all()
    wanted = [math.log2(x) if x else -math.inf for x in p[0].tolist()]
    assert torch.equal(logits[0], torch.tensor(wanted, dtype=torch.float64).to(torch.float32))


def test_numbers_that_are_no_probabilities():
    p = torch.tensor([[0.0, -0.0, -1.0, -math.inf, math.inf, 1.0, 2.0**-149, 8.0, math.nan, -math.nan]])
    assert base_2_logits(p)[0, :8].tolist() == [-math.inf] * 4 + [math.inf, 0.0, -149.0, 3.0]
    assert base_2_logits(p)[0, 8:].isnan().all()


def test_renormalised_rows_sum_to_one_and_keep_the_ratios_of_small_ones(generator):
    p = torch.softmax(4 * torch.randn(9, 5000, generator=generator), -1)
    keep = keep_first(p, torch.arange(1, 10) * 500)
    made = renormalised(p, keep)
    assert torch.allclose(made.double().sum(-1), torch.ones(9, dtype=torch.float64), atol=1e-6)
    wanted = torch.where(keep, p.double(), 0.0)
    assert torch.allclose(made.double(), wanted / wanted.sum(-1, keepdim=True), rtol=1e-6, atol=0.0)


def test_a_nucleus_is_the_shortest_prefix(generator):
    p, share = torch.softmax(3 * torch.randn(50, 300, generator=generator), -1), torch.rand(50, generator=generator)
    keep = keep_nucleus(p, share.double())
    inside = torch.where(keep, p.double(), 0.0)
    least = torch.where(keep, p.double(), 2.0).amin(-1)
    assert (inside.sum(-1) >= share * p.double().sum(-1) - 1e-9).all()
    assert (inside.sum(-1) - least <= share * p.double().sum(-1) + 1e-9).all()
    assert (torch.where(keep, 0.0, p).amax(-1) <= least).all()


def test_seeds_of_rows_are_words_of_philox_and_differ():
    rows, seed = torch.tensor([0, 1, 2, 2**40]), torch.tensor([-5])
    key = tuple(word.expand(4) for word in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    counter = (rows & 0xFFFFFFFF, rows >> 32, torch.zeros(4, dtype=torch.int64), torch.full((4,), 0x73656564))
    low, high, *_ = philox_4x32_10(counter, key)
    words = [(h * 2**32 + x + 2**63) % 2**64 - 2**63 for h, x in zip(high.tolist(), low.tolist(), strict=True)]
    assert seeds_of_rows(seed, rows).tolist() == words
    many = torch.cat([seeds_of_rows(torch.tensor([s]), torch.arange(2000)) for s in range(50)])
    assert len(set(many.tolist())) == 100_000
