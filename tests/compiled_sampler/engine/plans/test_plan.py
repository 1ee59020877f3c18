"""Plans: decided from the parameters, few are kept, refused once stale, brought to the device once; and their rows."""

import contextlib
import dataclasses
import gc
import itertools
import re
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_sampler import Plan, Sampler, Verification
from compiled_sampler.engine import request_holder
from compiled_sampler.engine.boundary.arguments import FEW
from compiled_sampler.engine.plan import drafted_ids, padded_ids
from compiled_sampler.engine.requests import uploads
from compiled_sampler.engine.step import Step
from compiled_sampler.engine.step_runner import StepRunner
from compiled_sampler.modes import mode_table
from graph_cache import PinnedRing
from tests.builders.sampler import (
    REQUESTS,
    V,
    held,
    holding,
    normal_rows,
    nothing_compiles,
    same,
    sampler_with,
    shared_sampler,
    stages_stay_eager,
)
from tests.tiers import tiers

MODES = mode_table(V, "top_k")
COUNTS = (3, 0, 2, 1, 0, 4)


@pytest.fixture
def sampler() -> Sampler:
    """One request for each mode, in the first slots, and two free slots."""
    return sampler_with(REQUESTS.values(), buckets=(2, 4))


def sampled(sampler: Sampler, plan: Plan):
    return sampler.sample(plan, normal_rows(plan.num_rows), torch.arange(plan.num_rows))


def test_a_batch_of_one_kind_takes_its_mode(sampler):
    assert [sampler.plan([slot]).mode.name for slot in range(len(REQUESTS))] == list(REQUESTS)
    assert sampler.plan([]).mode.name == sampler.plan([-1, -1]).mode.name == "greedy"
    assert sampler.plan(range(len(REQUESTS))).mode.name == "full"


def test_a_forced_mode_is_taken_by_name_or_family(sampler):
    assert [sampler.plan([0], mode.name).mode for mode in MODES] == list(MODES)
    assert sampler.plan([0], "top_k_top_p").mode.name == "top_k_top_p[64]"


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("", "None chooses"),
        ("full[64]", "did you mean 'full'?"),
        ("top_k_top_p[65]", "did you mean 'top_k_top_p[64]'?"),
    ],
)
def test_an_unknown_mode_lists_the_modes(sampler, name, way_out):
    with pytest.raises(ValueError, match=re.escape(f"got {name!r}; {way_out}")) as caught:
        sampler.plan([0], mode=name)
    assert all(mode.name in str(caught.value) for mode in MODES)
    assert sampler.plan([0]).mode.name == "greedy"


@pytest.mark.parametrize(
    ("mode", "slot", "reason"),
    [
        ("greedy", 1, "temperature 0.9 draws"),
        ("no_filter", 2, "min_p 0.05 is applied"),
        ("min_p", 3, "top_k 20, top_p 0.9 are applied"),
        ("top_k", 3, "top_k 20, top_p 0.9 are applied"),
        ("top_k_top_p[64]", 4, "top_k 90 exceeds the capacity of 64"),
        ("top_k_top_p[64]", 5, "top_k off exceeds the capacity of 64"),
        ("top_k_top_p", 1, "top_k is off, so candidates alone cannot hold the row"),
    ],
)
def test_a_mode_that_does_not_cover_names_row_slot_and_reason(sampler, mode, slot, reason):
    with pytest.raises(ValueError, match="does not cover row") as caught:
        sampler.plan([0, -1, slot, slot], mode=mode)
    assert f"row 2 (slot {slot}): {reason}; mode=None chooses" in str(caught.value)
    assert sampler.plan([0, -1, slot, slot]).mode.name in (*REQUESTS,)


@pytest.mark.parametrize("behind", [0, FEW], ids=["few rows", "many rows"])
@pytest.mark.parametrize("slot", [6, 8, -2, 2**70, -(2**63)])
def test_a_slot_without_a_request_is_refused_each_time(sampler, slot, behind):
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"row 1: slot must come from add_request\(\) .*got {slot}; -1"):
            sampler.plan([0, slot] + [0] * behind)
    assert sampler.plan([0, -1]).slots == (0, -1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"slots": None}, "slots must be a sequence of ints, got None"),
        ({"slots": "01"}, "slots must be a sequence of ints, got '01'"),
        ({"slots": {0, 1}}, "slots must be a sequence of ints, got {0, 1}"),
        ({"slots": [0, 0.0]}, "slot of row 1 must be an int, got 0.0"),
        ({"slots": [True]}, "slot of row 0 must be an int, got True"),
        ({"slots": [0, np.True_]}, "slot of row 1 must be an int, got np.True_"),
        ({"slots": torch.tensor([0, 1])}, "slot of row 0 must be an int, got tensor(0)"),
        ({"num_drafts": [True, 2]}, "num_drafts of request 0 must be an int, got True; pass Python ints"),
        ({"num_drafts": "12"}, "num_drafts must be a sequence of ints, got '12'; one count a slot"),
        ({"num_drafts": {1, 2}}, "num_drafts must be a sequence of ints, got {1, 2}; one count a slot"),
        ({"mode": ["full"]}, "mode must be a str, got ['full']; sampler.modes have the names, None chooses"),
    ],
    ids=repr,
)
def test_other_types_are_refused_though_equal_ones_are_planned(sampler, given, words):
    for equal in ({"slots": [0, 0]}, {"slots": [1]}, {"slots": [0, 1]}, {"slots": [0, 1], "num_drafts": [1, 2]}):
        sampler.plan(**equal)
    with pytest.raises(TypeError, match=re.escape(words)):
        sampler.plan(**{"slots": [0, 1], **given})


@pytest.mark.parametrize("slot", [np.True_, 1.0], ids=repr)
def test_requests_are_asked_for_by_an_int(sampler, slot):
    for call in (sampler.request, sampler.remove_request):
        with pytest.raises(TypeError, match=r"slot must be an int, got .*; add_request\(\) returns it"):
            call(slot)


@pytest.mark.parametrize("plan", [None, 3])
def test_what_is_no_plan_is_refused(sampler, plan):
    logits, positions, drafts = torch.zeros(2, V), torch.arange(2), torch.zeros(2, 1, dtype=torch.int64)
    calls = [(sampler.sample, logits, positions), (sampler.draft, logits, positions), (sampler.probs, logits)]
    calls += [(verify, logits, drafts, positions) for verify in (sampler.verify, sampler.verify_from_probs)]
    for call, *tensors in calls:
        with pytest.raises(TypeError, match=r"plan must be a Plan, got .*; sampler.plan\(slots\) makes one"):
            call(plan, *tensors)


def test_an_engine_replaces_a_buffer_by_keyword_and_the_plan_knows_it(sampler):
    plan = sampler.plan([3, -1, 0])
    replaced = dataclasses.replace(plan, slot_ids=plan.slot_ids.clone())
    assert (plan.has_planned_slots, replaced.has_planned_slots) == (True, False)
    assert replaced.planned is plan.planned
    assert same(sampled(sampler, replaced), sampled(sampler, plan))
    with pytest.raises(TypeError, match="positional"):
        Plan((0,), MODES[0])  # type: ignore[call-arg, misc]


def test_integers_of_numpy_are_slots_and_counts(sampler):
    plan = sampler.plan(np.array([3, -1, 0]))
    assert plan.slots == (3, -1, 0)
    assert set(map(type, plan.slots)) == {int}
    assert sampler.request(np.int64(3)) == sampler.request(3)
    plan = sampler.plan([0, 1], num_drafts=np.array([1, 2]))
    assert plan is sampler.plan([0, 1], num_drafts=[np.int32(1), 2]) is sampler.plan([0, 1], num_drafts=[1, 2])
    assert set(map(type, plan.num_drafts)) == {int}


def test_a_plan_serves_while_its_own_requests_stay(sampler):
    plan = sampler.plan([1, -1, 3])
    wanted = sampled(sampler, plan)
    sampler.remove_request(2)
    sampler.add_request(REQUESTS["full"])
    sampler.remove_request(0)
    for _ in range(2):
        assert same(sampled(sampler, plan), wanted)
    assert same(sampled(sampler, sampler.plan([1, -1, 3])), wanted)
    sampler.remove_request(3)
    for is_taken in (False, False, True):
        while is_taken and sampler.add_request(REQUESTS["top_k_top_p[64]"]) != 3:
            pass  # the slots before it are free
        with pytest.raises(ValueError, match=r"request of row 2 \(slot 3\) was removed; make a new plan"):
            sampled(sampler, plan)
    assert same(sampled(sampler, sampler.plan([1, -1, 3])), wanted)


def recorded(count: int) -> Sampler:
    """Replays recordings for as many greedy requests."""
    made = Sampler(V, 4, backend="eager", buckets=[2], verifications=[Verification("match", 2)])
    return holding(made, "graph", [REQUESTS["greedy"]] * count, ["greedy"])


@pytest.mark.parametrize("has_drafts", [False, True])
def test_few_plans_are_kept_while_nothing_changes(has_drafts):
    sampler = recorded(2)
    assert sampler.plan([0, 1]) is sampler.plan((0, 1))
    assert len({sampler.plan([0, 1]), sampler.plan([1, 0]), sampler.plan([0, 1], mode="full")}) == 3
    for i, rows in itertools.product(range(50), range(6)):
        counts = [rows, i] if has_drafts else None
        slots = [0, 1] if has_drafts else [i % 2] * (1 + rows + i)
        plan = sampler.plan(slots, num_drafts=counts)
        assert sampler.plan(slots, num_drafts=counts) is plan
        assert len(sampler._plans) <= request_holder._MOST_PLANS


def test_slots_that_stay_are_not_brought_again(monkeypatch):
    sampler, sent = recorded(3), []
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


def test_captures_that_use_plans_first_read_their_numbers_however_many_they_are(monkeypatch):
    """A capture took pinned memory that only a new plan brought, each time that it read a plan: it ran out."""
    sampler = sampler_with([REQUESTS["greedy"]])
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
    sampler = recorded(2)
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


# Rows of logits.


def by_row(numbers: list[int]) -> list[int]:
    """A number for each request as one for each of its rows."""
    return [number for number, count in zip(numbers, COUNTS, strict=True) for _ in range(count + 1)]


def test_requests_have_their_rows_one_after_the_other(sampler):
    plan = sampler.plan(range(6), num_drafts=COUNTS)
    assert plan.first_rows == (0, 4, 5, 8, 10, 11)
    assert plan.first_rows[-1] + COUNTS[-1] + 1 == plan.num_rows
    assert sampler.plan([3, -1, 0]).first_rows == sampler.plan([3, -1, 0], num_drafts=[0] * 3).first_rows == (0, 1, 2)
    assert sampler.plan([]).first_rows == sampler.plan([], num_drafts=[]).first_rows == ()


@pytest.mark.parametrize("backend", tiers(["reference", "eager"], ["reference", "eager", "compiled", "graph"]))
def test_probs_of_drafts_are_those_of_the_same_rows_without_drafts(backend):
    sampler, logits = shared_sampler(V, backend=backend), normal_rows(sum(COUNTS) + 6)
    with held(sampler, list(REQUESTS.values())) as taken:
        slots = [*taken[:2], -1, *taken[3:]]
        plan = sampler.plan(slots, num_drafts=COUNTS)
        law = sampler.probs(plan, logits)
        assert torch.equal(law, sampler.probs(sampler.plan(by_row(slots)), logits))
        with pytest.raises(ValueError, match=rf"logits must be \[16, >= {V}\], got \[11, {V}\]"):
            sampler.probs(plan, logits[:11])
        assert law.sum(-1).tolist() == pytest.approx([float(slot >= 0) for slot in by_row(slots)], abs=1e-6)
        part = torch.full_like(law, -7.0)
        assert sampler.probs(plan, logits, out=part) is part
        assert torch.equal(part, law)


def test_after_a_warmup_probs_compile_nothing():
    sampler = Sampler(V, 2, backend="compiled", probabilities=True)
    with stages_stay_eager():
        sampler.warmup(modes=["greedy"])
    slot = sampler.add_request(REQUESTS["greedy"])
    plans = [sampler.plan([slot]), sampler.plan([slot] * 2), sampler.plan([slot], num_drafts=[1])]
    with nothing_compiles():
        laws = [sampler.probs(plan, normal_rows(plan.num_rows)) for plan in plans]
    assert torch.equal(laws[1], laws[2])


@pytest.mark.parametrize("largest", [2, 3, 8])
def test_steps_get_numbers_laid_out_as_at_warmup(monkeypatch, largest):
    """Another stride or an unaligned address would be another kernel, compiled at the first call."""
    sampler = sampler_with([REQUESTS["greedy"]] * 4, buckets=[largest])
    seen: list[Tensor] = []
    resolve = StepRunner.resolve

    def watched(runner: StepRunner, step: Step, plan: Plan, tensors: dict[str, Tensor], out: Any) -> Any:
        seen.extend(tensor for name, tensor in tensors.items() if name in ("positions", "offsets"))
        return resolve(runner, step, plan, tensors, out)

    monkeypatch.setattr(StepRunner, "resolve", watched)
    for count in (1, 3, 4):
        sampler.probs(sampler.plan(range(count)), normal_rows(count))
        sampler.draft(sampler.plan(range(count)), normal_rows(count), torch.arange(count), False, offset=1)
    assert len(seen) == 9
    assert [each.tolist() for each in seen[2::3]] == [[1], [1] * 3, [1] * 4]
    assert all(each.stride() == (1,) and each.data_ptr() % 16 == 0 for each in seen)


def test_plans_and_drafts_print_modes_and_first_requests_and_no_tensor(sampler):
    long = repr(sampler.plan([0] * 500, num_drafts=[1] * 500))
    assert "slots=(0, 0, 0, 0, 0, 0, 0, 0, ... 500 in all), num_drafts=(1, 1," in long
    replaced = dataclasses.replace(sampler.plan([0]), slot_ids=torch.empty(1, dtype=torch.int64, device="meta"))
    assert repr(replaced) == "Plan(mode='greedy', slots=(0,), replaced=('slot_ids',))"
    broken = dataclasses.replace(sampler.plan([0]), slots=torch.zeros(1), mode=None)
    assert repr(broken) == "Plan(mode='NoneType', slots=Tensor, replaced=('slots', 'mode'))"
    draft = sampler.draft(sampler.plan([1, 2]), normal_rows(2), torch.arange(2), False, offset=3)
    assert repr(draft) == "Draft(offset=3, coupled=False, plan=Plan(mode='min_p', slots=(1, 2)))"
