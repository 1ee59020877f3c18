"""The rows of logits that each request of a plan has, the distribution of each, and what plans and drafts print."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import Plan, Sampler
from compiled_sampler.engine.step import Step
from compiled_sampler.engine.step_runner import StepRunner
from tests.builders.sampler import REQUESTS, held, nothing_compiles, shared_sampler, stages_stay_eager
from tests.tiers import tiers

V = 127
COUNTS = (3, 0, 2, 1, 0, 4)


@pytest.fixture
def sampler() -> Sampler:
    """Eager, with a request for each mode."""
    made = Sampler(V, 8, backend="eager")
    for params in REQUESTS.values():
        made.add_request(params)
    return made


def rows_of(count: int) -> Tensor:
    return 3.0 * torch.randn(count, V, generator=torch.Generator().manual_seed(0))


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
    sampler, logits = shared_sampler(V, backend=backend), rows_of(sum(COUNTS) + 6)
    with held(sampler, list(REQUESTS.values())) as taken:
        slots = [*taken[:2], -1, *taken[3:]]
        plan = sampler.plan(slots, num_drafts=COUNTS)
        law = sampler.probs(plan, logits)
        assert torch.equal(law, sampler.probs(sampler.plan(by_row(slots)), logits))
        assert law.sum(-1).tolist() == pytest.approx([float(slot >= 0) for slot in by_row(slots)], abs=1e-6)
        part = torch.full_like(law, -7.0)
        assert sampler.probs(plan, logits, out=part) is part
        assert torch.equal(part, law)


def test_probs_follow_the_buffers_of_an_engine(sampler):
    plan = sampler.plan([5, 5, 5], mode="full", num_drafts=[2, 2, 2])
    slots, counts = torch.tensor([1, -1, 4]), torch.tensor([3, -1, 1])
    replaced = dataclasses.replace(plan, slot_ids=slots, draft_counts=counts)
    logits = rows_of(9)
    wanted = sampler.probs(sampler.plan([1] * 4 + [4] * 2 + [-1] * 3, mode="full"), logits)
    assert torch.equal(sampler.probs(replaced, logits), wanted)


def test_after_a_warmup_probs_compile_nothing():
    sampler = Sampler(V, 2, backend="compiled", probabilities=True)
    with stages_stay_eager():
        sampler.warmup(modes=["greedy"])
    slot = sampler.add_request(REQUESTS["greedy"])
    plans = [sampler.plan([slot]), sampler.plan([slot] * 2), sampler.plan([slot], num_drafts=[1])]
    with nothing_compiles():
        laws = [sampler.probs(plan, rows_of(plan.num_rows)) for plan in plans]
    assert torch.equal(laws[1], laws[2])


@pytest.mark.parametrize("largest", [2, 3, 8])
def test_steps_get_numbers_laid_out_as_at_warmup(monkeypatch, largest):
    """Another stride or an unaligned address would be another kernel, compiled at the first call."""
    sampler = Sampler(V, 4, backend="eager", buckets=[largest])
    slots = [sampler.add_request(REQUESTS["greedy"]) for _ in range(4)]
    seen: list[Tensor] = []
    resolve = StepRunner.resolve

    def watched(runner: StepRunner, step: Step, plan: Plan, tensors: dict[str, Tensor], out: Any) -> Any:
        seen.extend(tensor for name, tensor in tensors.items() if name in ("positions", "offsets"))
        return resolve(runner, step, plan, tensors, out)

    monkeypatch.setattr(StepRunner, "resolve", watched)
    for count in (1, 3, 4):
        sampler.probs(sampler.plan(slots[:count]), rows_of(count))
        sampler.draft(sampler.plan(slots[:count]), rows_of(count), torch.arange(count), False, offset=1)
    assert len(seen) == 9
    assert [each.tolist() for each in seen[2::3]] == [[1], [1] * 3, [1] * 4]
    assert all(each.stride() == (1,) and each.data_ptr() % 16 == 0 for each in seen)


@pytest.mark.parametrize("rows", [11, 17])
def test_probs_of_drafts_have_a_row_for_each_token_that_may_be_drawn(sampler, rows):
    plan = sampler.plan(range(6), num_drafts=COUNTS)
    with pytest.raises(ValueError, match=rf"logits must be \[16, >= {V}\], got \[{rows}, {V}\]"):
        sampler.probs(plan, rows_of(rows))


def test_plans_and_drafts_print_modes_and_first_requests_and_no_tensor(sampler):
    assert repr(sampler.plan([0, -1])) == "Plan(mode='greedy', slots=(0, -1))"
    assert repr(sampler.plan([2], num_drafts=[3])) == "Plan(mode='min_p', slots=(2,), num_drafts=(3,))"
    long = repr(sampler.plan([0] * 500, num_drafts=[1] * 500))
    assert "slots=(0, 0, 0, 0, 0, 0, 0, 0, ... 500 in all), num_drafts=(1, 1," in long
    assert len(long) < 200
    replaced = dataclasses.replace(sampler.plan([0]), slot_ids=torch.empty(1, dtype=torch.int64, device="meta"))
    assert repr(replaced) == "Plan(mode='greedy', slots=(0,), replaced=('slot_ids',))"
    broken = dataclasses.replace(sampler.plan([0]), slots=torch.zeros(1), mode=None)
    assert repr(broken) == "Plan(mode='NoneType', slots=Tensor, replaced=('slots', 'mode'))"
    draft = sampler.draft(sampler.plan([1, 2]), rows_of(2), torch.arange(2), False, offset=3)
    assert repr(draft) == "Draft(offset=3, coupled=False, plan=Plan(mode='min_p', slots=(1, 2)))"
