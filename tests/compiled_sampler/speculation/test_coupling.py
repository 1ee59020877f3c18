"""Drafts that race on the target's noise: how often ``match`` accepts them, and that the stream does not notice.

A rate over R rows of independent noise is off by 5 standard deviations, at most ``2.5 / sqrt(R)``, with a chance of
6e-7; thirteen bounds are tested, with fixed seeds: 8e-6. The control drafts on noise of its own and must miss it.
"""

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams
from tools.measuring import logits_like

V, R = 1000, 4000
SLACK = 2.5 / R**0.5


@pytest.fixture(scope="module")
def peaked() -> torch.Tensor:
    """Rows like those of a language model, ``[R, V]``."""
    return logits_like("peaked", R, V, "cpu", torch.float32, seed=0)


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    """Holds one request in slot 0."""
    made = Sampler(V, 1, backend="eager")
    made.add_request(SamplingParams(seed=5))
    return made


def accepted(sampler: Sampler, target: torch.Tensor, drafted: torch.Tensor) -> float:
    """The share of rows whose draft ``match`` accepts; every row is a request with one draft and a bonus row."""
    plan = sampler.plan([0] * R, num_drafts=[1] * R)
    logits = target.repeat_interleave(2, 0)
    out = sampler.verify(plan, logits, drafted[:, None], torch.arange(R))
    own = sampler.sample(sampler.plan([0] * R), target, torch.arange(R)).token_ids
    assert torch.equal(out.token_ids[:, 0], own)
    return float(out.num_accepted.float().mean())


@pytest.mark.parametrize(("sigma", "stated"), [(0.3, 0.88), (0.7, 0.72), (1.2, 0.55), (2.0, 0.37)])
def test_coupled_drafts_are_accepted_nearly_as_often_as_can_be(sampler, peaked, sigma, stated):
    other = peaked + sigma * torch.randn(R, V, generator=torch.Generator().manual_seed(1))
    overlap = torch.minimum(torch.softmax(peaked, -1), torch.softmax(other, -1)).sum(-1)
    least, most = (overlap / (2.0 - overlap)).mean(), overlap.mean()
    rate = accepted(sampler, peaked, sampler.draft(sampler.plan([0] * R), other, torch.arange(R)).token_ids)
    assert least - SLACK <= rate <= most + SLACK
    assert rate > stated - SLACK
    assert rate > accepted(sampler, peaked, other.argmax(-1)) + SLACK


def test_uncoupled_drafts_miss_the_bound(sampler, peaked):
    overlap = 1.0  # the drafter is the target itself
    drafts = sampler.draft(sampler.plan([0] * R), peaked, torch.arange(R), coupled=False).token_ids
    assert accepted(sampler, peaked, drafts) < overlap / (2.0 - overlap) - SLACK


def test_a_drafter_with_the_targets_logits_is_always_right(sampler, peaked):
    assert accepted(sampler, peaked, sampler.draft(sampler.plan([0] * R), peaked, torch.arange(R)).token_ids) == 1.0
