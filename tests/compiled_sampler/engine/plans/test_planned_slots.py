"""Slots that plans are made of: few are kept, and their numbers go to the device once."""

import contextlib
import dataclasses
import gc
import itertools
import weakref

import pytest
import torch

from compiled_sampler import Sampler, Verification
from compiled_sampler.engine import request_holder
from compiled_sampler.engine.plan import drafted_ids, padded_ids
from compiled_sampler.engine.requests import uploads
from graph_cache import PinnedRing
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
    sampler, sent = sampler_of("greedy", "greedy", "greedy"), []
    send = PinnedRing.send
    monkeypatch.setattr(PinnedRing, "send", lambda ring, *given: sent.append(ring) or send(ring, *given))

    def copies(*slots: int) -> int:
        before = len(sent)
        sampler.sample(sampler.plan(slots), torch.zeros(2, V), torch.arange(2))
        return len(sent) - before

    assert [copies(0, 1), copies(0, 1)] == [2, 0]  # parameters before the first replay, then slots; nothing
    sampler.remove_request(1)
    assert sampler.add_request(REQUESTS["greedy"]) == 1
    assert [copies(0, 1), copies(0, 2)] == [1, 1]
    for counts in ([1, 0], [0, 2]):
        plan, before = sampler.plan([0, 2], num_drafts=counts), len(sent)
        sampler.verify(plan, torch.zeros(plan.num_rows, V), torch.zeros(2, 2, dtype=torch.int64), torch.arange(2))
        assert len(sent) == before + 1  # the slots with the counts


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


def test_captures_that_use_plans_first_read_their_numbers_however_many_they_are(monkeypatch):
    """A capture took pinned memory that only a new plan brought, each time that it read a plan: it ran out."""
    sampler = Sampler(V, 4, backend="eager")
    sampler.add_request(REQUESTS["greedy"])
    with monkeypatch.context() as patched:  # a CPU stands for the device
        patched.setattr(torch.cuda, "Stream", lambda device: None)
        patched.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patched.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patched.setattr(uploads, "is_capturing", lambda device: True)
        patched.setattr(uploads, "_SLAB_SIZE", 2000)
        sampler._reserve = uploads.DeviceReserve(sampler.device)
        plans = []
        for count in range(1, 100):
            for drafts in (None, [1 + n % 3 for n in range(count)]):
                plan = sampler.plan([0, *[-1] * (count - 1)], num_drafts=drafts)
                copy = dataclasses.replace(plan)
                made = [
                    plan.slot_ids,
                    plan.draft_counts,
                    *((plan.drafted, copy.drafted, plan.padded) if drafts else ()),
                ]
                assert [plan.slot_ids is plan.slot_ids for _ in range(9)] == [True] * 9
                plans.append((plan, made))
    for plan, (slots, counts, *places) in plans:
        assert slots.tolist() == list(plan.slots)
        if counts is not None:
            assert counts.tolist() == list(plan.num_drafts)
            wanted = drafted_ids(counts.numpy()), drafted_ids(counts.numpy()), padded_ids(counts.numpy())
            for found, told in zip(places, wanted, strict=True):
                assert (found is None and told is None) or found.tolist() == told.tolist()
        assert all(each.data_ptr() % 16 == 0 for each in (slots, counts, *places) if each is not None)


def test_a_plan_that_a_graph_reads_is_not_freed(monkeypatch):
    sampler = sampler_of("greedy", "greedy")
    plans = [sampler.plan([slot]) for slot in (0, 1)]
    for plan, is_captured in zip(plans, (True, False), strict=True):
        with monkeypatch.context() as patched:
            patched.setattr(sampler, "_is_capturing", lambda is_captured=is_captured: is_captured)
            sampler.sample(plan, torch.zeros(1, V), torch.arange(1))
    held = [weakref.ref(plan) for plan in plans]
    sampler._plans.clear()
    del plans, plan
    gc.collect()
    assert [each() is not None for each in held] == [True, False]
