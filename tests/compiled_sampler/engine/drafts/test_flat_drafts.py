"""Drafts in one row after the other, ``[D]``: the bits of padded ones, on every path."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from compiled_sampler import Plan, Sampler, SamplingParams
from compiled_sampler.modes import RULES
from tests.builders.sampler import emptied, same, verifying_sampler
from tests.tiers import tiers

V, K, N = 60, 3, 5
COUNTS = [[2, 0, 3, 1, 3], [3, 3, 3, 3, 3], [1, 1, 1, 1, 1], [0, 0, 2, 0, 0], [0, 0, 0, 0, 0], [3, 0, 0, 0, 0]]


PARAMS = [SamplingParams(seed=n, temperature=float(n != 2), top_k=30) for n in range(N)]


@pytest.fixture(params=["eager", "reference", "graph"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return verifying_sampler(request.param, V, PARAMS, K)


def logits_of(rows: int) -> Tensor:
    return 2.0 * torch.randn(rows, V, generator=torch.Generator().manual_seed(0))


def drafts_of(sampler: Sampler, plan: Plan, logits: Tensor) -> Tensor:
    """Padded drafts ``[N, K]`` of which some are accepted, and some are no token ids."""
    made = torch.randint(-1, V + 1, (N, plan.width), generator=torch.Generator().manual_seed(1))
    for _ in range(2 if plan.width else 0):
        made[:, :2] = sampler.verify(plan, logits, made, torch.arange(N)).token_ids[:, : min(plan.width, 2)]
    return made


def flat_of(tokens: Tensor, counts: list[int]) -> Tensor:
    return torch.cat([row[:count] for row, count in zip(tokens, counts, strict=True)])


@pytest.mark.parametrize("counts", tiers([COUNTS[0], COUNTS[4]], COUNTS), ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_flat_drafts_are_verified_as_padded_ones(sampler, rule, counts):
    plan, where = sampler.plan(range(N), "full", counts), torch.arange(N)
    logits = logits_of(plan.num_rows)
    tokens = drafts_of(sampler, plan, logits)
    flat, wanted = flat_of(tokens, counts), sampler.verify(plan, logits, tokens, where, rule)
    assert (wanted.num_accepted > 0).any() or rule != "match" or not plan.width
    strided = torch.full((3 * len(flat),), V - 1)[::3].copy_(flat)
    for given in (flat, strided, flat.int(), flat):
        before = given.clone()
        assert same(sampler.verify(plan, logits, given, where, rule), wanted)
        out = emptied(wanted)
        assert sampler.verify(plan, logits, given, where, rule, out=out) is out
        assert same(out, wanted)
        assert torch.equal(given, before)
    if rule != "match" and plan.width:
        probs = torch.softmax(logits_of(len(flat)), -1)
        found, own = (sampler.verify(plan, logits, each, where, rule, draft_probs=probs) for each in (flat, tokens))
        assert same(found, own)
    probs = torch.softmax(logits, -1)
    found, own = (sampler.verify_from_probs(plan, probs, each, where, rule=rule) for each in (flat, tokens))
    assert same(found, own)


@pytest.mark.parametrize(
    ("rule", "dtype"),
    tiers([("match", torch.int32), ("block", torch.int64)], itertools.product(RULES, (torch.int64, torch.int32))),
    ids=str,
)
def test_flat_drafts_of_counts_on_the_device(sampler, rule, dtype):
    full, where = sampler.plan(range(N), "full", [K] * N), torch.arange(N)
    logits, buffer = logits_of(full.num_rows), torch.zeros(N, dtype=dtype)
    tokens = drafts_of(sampler, full, logits)
    slots = torch.arange(N, dtype=dtype)
    plan = dataclasses.replace(full, draft_counts=buffer, slot_ids=slots)
    for counts in (*COUNTS, [3, -1, 0, 2, -1]):
        buffer.copy_(torch.tensor(counts))
        slots.copy_(torch.where(buffer < 0, -1, torch.arange(N)))
        own = flat_of(tokens, [max(count, 0) for count in counts])
        for junk in (-1, V - 1, 2**40):
            flat = torch.full((N * K,), junk)
            flat[: len(own)] = own
            found, wanted = (sampler.verify(plan, logits, each, where, rule) for each in (flat, tokens))
            assert same(found, wanted)


def test_plans_of_one_shape_have_places_of_their_own(sampler):
    """A known call of the same sizes is no call of the same counts."""
    logits, where, flat = logits_of(N + 6), torch.arange(N), torch.arange(6)
    outs = []
    for counts in ([3, 1, 0, 1, 1], [1, 3, 1, 1, 0], [0, 1, 3, 1, 1], [3, 1, 0, 1, 1]):
        plan = sampler.plan(range(N), "full", counts)
        tokens = torch.full((N, K), -1)
        for row, its in zip(tokens, torch.split(flat, counts), strict=True):
            row[: len(its)] = its
        outs.append(sampler.verify(plan, logits, flat, where, "rejection"))
        assert same(outs[-1], sampler.verify(plan, logits, tokens, where, "rejection"))
    assert same(outs[0], outs[-1])
    assert not same(outs[0], outs[1])
