"""Slots that plans are made of: few are kept, and their numbers go to the device once."""

import itertools

import pytest
import torch

from compiled_sampler import Sampler, Verification
from compiled_sampler.engine import request_holder
from graph_cache import PinnedRing
from graph_cache.pinned import FetchRing
from tests.builders.sampler import REQUESTS, replay_recordings

V = 1000


def sampler_of(*names: str) -> Sampler:
    """Replays recordings; the requests are in its first slots."""
    sampler = Sampler(V, 4, backend="eager", buckets=[2], verifications=[Verification("match", 2)])
    replay_recordings(sampler)
    sampler.warmup(modes=["greedy"])
    for name in names:
        sampler.add_request(REQUESTS[name])
    return sampler


@pytest.mark.parametrize("has_drafts", [False, True])
def test_few_plans_are_kept(has_drafts):
    sampler = sampler_of("greedy", "greedy")
    for i, rows in itertools.product(range(50), range(6)):
        counts = [rows, i] if has_drafts else None
        slots = [0, 1] if has_drafts else [i % 2] * (1 + rows + i)
        plan = sampler.plan(slots, num_drafts=counts)
        assert sampler.plan(slots, num_drafts=counts) is plan
        assert len(sampler._plans) <= request_holder._MOST_PLANS


def test_slots_that_stay_are_not_brought_again(monkeypatch):
    sampler, sent, posted = sampler_of("greedy", "greedy", "greedy"), [], []

    def noted(log, work):
        return lambda ring, *given: log.append(given[0]) or work(ring, *given)

    def sample(*slots: int) -> tuple[int, int]:
        """The arrays that a step copies, and those that its graph fetches."""
        before = len(sent), len(posted)
        sampler.sample(sampler.plan(slots), torch.zeros(2, V), torch.arange(2))
        return len(sent) - before[0], len(posted) - before[1]

    monkeypatch.setattr(PinnedRing, "send", noted(sent, PinnedRing.send))
    monkeypatch.setattr(FetchRing, "post", noted(posted, FetchRing.post))
    assert sample(0, 1) == (1, 1)  # the parameters of three requests, before any step was replayed, and the slots
    assert sample(0, 1) == (0, 0)
    sampler.remove_request(1)
    assert sampler.add_request(REQUESTS["greedy"]) == 1
    assert sample(0, 1) == (0, 1)  # the parameters, with the slots
    assert sample(0, 2) == (0, 1)
    for counts in ([1, 0], [0, 2]):
        plan, before = sampler.plan([0, 2], num_drafts=counts), len(posted)
        sampler.verify(plan, torch.zeros(plan.num_rows, V), torch.zeros(2, 2, dtype=torch.int64), torch.arange(2))
        assert len(posted) == before + 2  # the slots, and the counts
    assert len(sent) == 1


def test_slots_are_those_that_are_given_wherever_they_lie():
    sampler = sampler_of("greedy", "greedy", "greedy")
    for i in range(1000):
        slots = tuple(n % 3 for n in range(i, i + 3 + i % 2))
        assert sampler.plan(slots).slots == slots


def test_a_plan_of_slots_that_changed_hands_serves_the_new_request():
    sampler = sampler_of("greedy", "greedy")
    before = sampler.plan([0, 1])
    sampler.remove_request(1)
    with pytest.raises(ValueError, match=r"row 1: slot must come from add_request\(\)"):
        sampler.plan([0, 1])
    sampler.add_request(REQUESTS["full"])
    after = sampler.plan([0, 1])
    assert (before.mode.name, after.mode.name) == ("greedy", "full")
    assert after.slots == before.slots
