"""Draft probabilities that are none: what is no number or negative weighs nothing, and more than 1 counts as 1."""

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams
from tests.builders.sampler import SHARED_SLOTS, V, same
from tests.tiers import tiers

N, K = 60, 3
NOTHING, CERTAIN = (float("nan"), -0.5, -float("inf")), (1.5, float("inf"))


def holding(backend: str, dtype: torch.dtype = torch.float32) -> Sampler:
    made = Sampler(V, SHARED_SLOTS, logits_dtype=dtype, backend=backend)
    assert [made.add_request(SamplingParams(seed=seed)) for seed in (1, 2)] == [0, 1]
    return made


def plan_of(sampler: Sampler):
    return sampler.plan([0, 1] * (N // 2), num_drafts=[K] * N)


@pytest.mark.parametrize(
    ("backend", "rule"),
    tiers(
        [("eager", "rejection"), ("eager", "block")],
        [("eager", "rejection"), ("eager", "block"), ("compiled", "rejection")],
    ),
)
def test_strange_draft_probabilities_count_as_the_nearest(backend, rule):
    sampler = holding(backend)
    logits, q = 2.0 * torch.randn(N * (K + 1), V), torch.softmax(torch.randn(N * K, V), -1)
    drafts = torch.multinomial(q, 1).view(N, K)

    def verified(probs, by=sampler):
        return by.verify(plan_of(by), logits, drafts, torch.arange(N), rule, draft_probs=probs)

    usual, where = verified(q), torch.rand(q.shape) < 0.3
    nothing = torch.tensor(NOTHING)[torch.randint(len(NOTHING), q.shape)]
    certain = torch.tensor(CERTAIN)[torch.randint(len(CERTAIN), q.shape)]
    for strange, counts in ((nothing, 0.0), (certain, 1.0)):
        found = verified(torch.where(where, strange, q))
        assert same(found, verified(torch.where(where, counts, q)))
        assert same(found, verified(torch.where(where, counts, q), holding("reference")))
        assert not same(found, usual)


@pytest.mark.parametrize(("dtype", "rule"), tiers([], [(torch.bfloat16, "rejection"), (torch.float16, "match")]))
def test_logits_of_16_bits_are_verified_alike_compiled(dtype, rule):
    logits = (2.0 * torch.randn(N * (K + 1), V)).to(dtype)
    law = torch.softmax(logits.view(N, K + 1, V)[:, :K].flatten(0, 1).float(), -1)
    drafts = torch.multinomial(law, 1).view(N, K)
    q = torch.softmax(torch.randn(N * K, V), -1) if rule == "rejection" else None

    def verified(backend, target):
        sampler = holding(backend, target.dtype)
        return sampler.verify(plan_of(sampler), target, drafts, torch.arange(N), rule, draft_probs=q)

    wanted = verified("eager", logits)
    assert same(verified("compiled", logits), wanted)
    assert same(verified("eager", logits.float()), wanted)
    assert len(set(wanted.num_accepted.tolist())) > 1
    assert not same(verified("eager", logits.roll(1, -1)), wanted)
