"""Drafts in one row after the other, ``[D]``: the bits of padded ones, on every path."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_sampler import Plan, Sampler, SamplingParams, VerifyOutputs
from compiled_sampler.batch import tensors_of
from compiled_sampler.engine.plan import padded_ids
from compiled_sampler.modes import RULES
from compiled_sampler.speculation.row_layout import padded
from tests.builders.sampler import same, verifying_sampler
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
        out = VerifyOutputs(*(torch.full_like(each, -7) for each in tensors_of(wanted)))
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


@pytest.mark.parametrize("size", [8, 10])
def test_another_number_of_drafts_is_refused(sampler, size):
    plan, where = sampler.plan(range(N), "full", COUNTS[0]), torch.arange(N)
    logits = logits_of(plan.num_rows)
    for _ in range(2):
        sampler.verify(plan, logits, torch.zeros(9, dtype=torch.int64), where)
        words = (
            rf"flat draft_token_ids must be \[9\], the sum of num_drafts, got \[{size}\]; slice it, or pass \[5, >= 3\]"
        )
        with pytest.raises(ValueError, match=words):
            sampler.verify(plan, logits, torch.zeros(size, dtype=torch.int64), where)
        with pytest.raises(ValueError, match=r"draft_token_ids must be \[5, >= 3\] as planned, got \[\]; pad with -1"):
            sampler.verify(plan, logits, torch.tensor(3), where)
        with pytest.raises(TypeError, match=r"draft_token_ids must be torch\.int64 or torch\.int32, got torch\.int16"):
            sampler.verify(plan, logits, torch.zeros(9, dtype=torch.int16), where)


def test_results_do_not_overwrite_flat_drafts(sampler):
    plan, memory, where = sampler.plan(range(N), "full", COUNTS[0]), torch.zeros(40, dtype=torch.int32), torch.arange(N)
    logits, counts = logits_of(plan.num_rows), [torch.zeros(N, dtype=torch.int32) for _ in range(4)]
    for start, fits in ((0, False), (8, False), (9, True)):
        out = VerifyOutputs(memory[start : start + N * (K + 1)].view(N, K + 1), *counts)
        if fits:
            sampler.verify(plan, logits, memory[:9], where, out=out)
            continue
        with pytest.raises(ValueError, match=r"out\.token_ids must have memory of its own, got that of an input"):
            sampler.verify(plan, logits, memory[:9], where, out=out)
        assert not memory.any()


def test_a_batch_without_requests(sampler):
    plan, none = sampler.plan([], num_drafts=[]), torch.empty(0, dtype=torch.int32)
    assert sampler.verify(plan, logits_of(0), none, none).token_ids.shape == (0, 1)


@pytest.mark.parametrize("counts", [*COUNTS[:4], COUNTS[5]], ids=str)
def test_places_are_the_same_from_the_host_and_from_the_device(counts):
    flat = torch.arange(sum(counts)) + 10
    there = padded(flat, torch.tensor(counts), max(counts))
    assert torch.equal(flat[torch.from_numpy(padded_ids(np.array(counts)))].view(there.shape), there)
    own = [there[n, :count].tolist() for n, count in enumerate(counts)]
    assert list(itertools.chain(*own)) == flat.tolist()
