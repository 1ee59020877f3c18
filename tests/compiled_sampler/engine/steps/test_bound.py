"""Steps that work in the engine's own tensors: the same tokens as eager torch, whatever comes between."""

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import SampleOutputs, Sampler, SamplingParams, Verification, VerifyOutputs
from tests.builders.sampler import normal_rows, replay_recordings, same, sampler_with

V, R, K = 300, 5, 3
PARAMS = [
    SamplingParams(seed=1, temperature=0.0),
    SamplingParams(seed=2, top_k=20, top_p=0.9),
    SamplingParams(seed=3),
    SamplingParams(seed=4, min_p=0.1),
    SamplingParams(seed=5, top_p=0.8),
    SamplingParams(seed=6, top_k=40),
]
BACKENDS = ["recorded", pytest.param("cuda", marks=pytest.mark.gpu)]


def holding(device: str, backend: str) -> Sampler:
    ways = [Verification("match", K)]
    return sampler_with(PARAMS, V, 8, device=device, backend=backend, buckets=[2, 8], verifications=ways)


def bound_to(sampler: Sampler, **tensors: Any) -> Sampler:
    """Replays graphs, on the CPU recorded ones, that were captured after ``bind``."""
    if sampler.device.type == "cpu":
        replay_recordings(sampler)
    sampler.bind(**tensors)
    sampler.warmup(modes=["full"])
    return sampler


@pytest.fixture(params=BACKENDS)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return holding("cuda", "graph") if request.param == "cuda" else holding("cpu", "eager")


@pytest.fixture
def reference() -> Sampler:
    return holding("cpu", "eager")


def normal(rows: int, seed: int) -> Tensor:
    return normal_rows(rows, V, seed)


def samples(rows: int, device: torch.device, **fields: Tensor) -> SampleOutputs:
    made = [torch.zeros(rows, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32)]
    return SampleOutputs(*made, **fields)


def in_place(sampler: Sampler, *names: str) -> int:
    """How many runs were served by variants that are bound to exactly these."""
    coverage, wanted = sampler.statistics().coverage, f"bound to {', '.join(names)}"
    return sum(count for name, count in coverage.items() if name.endswith(wanted))


def test_a_step_in_place_draws_the_same_tokens_in_every_bucket(sampler, reference):
    device = sampler.device
    logits, out = normal(8, 0).to(device), samples(8, device)
    positions = torch.zeros(8, dtype=torch.int64, device=device)
    bound_to(sampler, logits=logits, positions=positions, out=out)
    for step, slots in enumerate([[0, 1, 2, 3, 4], [5, -1, 2, 2, 0], [1, 1], [3], [*range(6), 0, 1]]):
        rows = len(slots)
        logits.copy_(normal(8, step))
        positions.copy_(torch.arange(8) + step)
        part = SampleOutputs(out.token_ids[:rows], out.status[:rows])
        found = sampler.sample(sampler.plan(slots, "full"), logits[:rows], positions[:rows], part)
        assert found is part
        wanted = reference.sample(reference.plan(slots, "full"), logits[:rows].cpu(), positions[:rows].cpu())
        assert same(found, wanted)
        assert in_place(sampler, "logits", "positions", "out") == step + 1


def test_numbers_that_lie_elsewhere_are_copied_and_other_logits_run_without_a_graph(sampler, reference):
    device = sampler.device
    logits, positions, out = normal(8, 0).to(device), torch.arange(8, device=device), samples(8, device)
    bound_to(sampler, logits=logits, positions=positions, out=out)
    plan, wanted = sampler.plan(range(R), "full"), reference.plan(range(R), "full")
    bound = logits[:R], positions[:R], SampleOutputs(out.token_ids[:R], out.status[:R])
    others = bound[0].clone(), bound[1].clone(), samples(R, device)
    for step in range(8):
        taken = [pair[step >> i & 1] for i, pair in enumerate(zip(bound, others, strict=True))]
        before = [each.clone() for each in out[:2]]
        found = sampler.sample(plan, *taken)
        assert found is taken[2]
        assert same(found, reference.sample(wanted, taken[0].cpu(), taken[1].cpu()))
        assert found is bound[2] or all(map(torch.equal, before, out[:2]))
    coverage = {name.removeprefix("full rows=5 -> "): count for name, count in sampler.statistics().coverage.items()}
    assert coverage == {
        "full[8] bound to logits, positions, out": 1,
        "full[8] bound to logits, positions": 1,
        "full[8] bound to logits": 2,
        "direct": 4,
    }


def test_slots_of_an_engine_are_read_in_place_where_no_row_is_behind_them(sampler, reference):
    device = sampler.device
    logits, positions = normal(8, 0).to(device), torch.arange(8, device=device)
    slots = torch.full((8,), 5, device=device)
    bound_to(sampler, logits=logits, positions=positions, slots=slots)
    for step, rows in enumerate([8, 2, 5, 8]):
        slots[:rows] = torch.arange(step, step + rows) % 6
        plan = dataclasses.replace(sampler.plan([-1] * rows, "full"), slot_ids=slots[:rows])
        found = sampler.sample(plan, logits[:rows], positions[:rows])
        own = reference.plan(slots[:rows].tolist(), "full")
        assert same(found, reference.sample(own, logits[:rows].cpu(), positions[:rows].cpu()))
    assert in_place(sampler, "logits", "slots", "positions") == 3


def test_a_request_that_comes_between_steps_in_place_is_seen(sampler, reference):
    device = sampler.device
    logits, positions = normal(2, 0).to(device), torch.arange(2, device=device)
    bound_to(sampler, logits=logits, positions=positions)
    for step in range(5):
        params = SamplingParams(seed=step, top_k=3 + step)
        slots = sampler.add_request(params), reference.add_request(params)
        plans = sampler.plan([0, slots[0]], "full"), reference.plan([0, slots[1]], "full")
        found = sampler.sample(plans[0], logits, positions)
        assert same(found, reference.sample(plans[1], logits.cpu(), positions.cpu()))
        for each, slot in zip((sampler, reference), slots, strict=True):
            each.remove_request(slot)


def test_ragged_verifications_in_place_give_the_same_tokens(sampler, reference):
    device, most = sampler.device, 8
    buffer, drafts = normal(most * (K + 1), 0).to(device), torch.randint(0, V, (most, K), device=device)
    positions = torch.arange(most, device=device)
    singles = [torch.zeros(most, dtype=dtype, device=device) for dtype in (*[torch.int64] * 3, torch.int32)]
    out = VerifyOutputs(torch.zeros(most, K + 1, dtype=torch.int64, device=device), *singles)
    bound_to(sampler, logits=buffer, positions=positions, out=out)
    for step in range(6):
        counts = [(step + n) % (K + 1) for n in range(R)]
        plans = [each.plan(range(R), "full", counts) for each in (sampler, reference)]
        buffer.copy_(normal(most * (K + 1), step))
        rows = buffer[: plans[0].num_rows]
        part = VerifyOutputs(*(each[:R] for each in out[:5]))
        found = sampler.verify(plans[0], rows, drafts[:R], positions[:R], out=part)
        assert same(found, reference.verify(plans[1], rows.cpu(), drafts[:R].cpu(), positions[:R].cpu()))
    assert in_place(sampler, "logits x 3", "positions", "out") == 6


def test_a_graph_that_left_is_released_with_the_next_call():
    """What was remembered of calls held graphs that were evicted."""
    sampler = bound_to(holding("cpu", "eager"))
    logits, positions, plan = normal(R, 0), torch.arange(R), sampler.plan(range(R), "full")
    sampler.sample(plan, logits, positions)
    variants = [weakref.ref(each.outputs) for each in sampler._runner._cache._variants.values()]
    sampler._runner._cache.evict()
    sampler._runner._cache._statics._outputs.clear()
    sampler.sample(plan, logits, positions)
    gc.collect()
    assert all(each() is None for each in variants)


def test_the_graphs_of_a_dropped_sampler_are_released_at_once():
    """Registered callables and remembered calls once held their own cache, so that memory waited for the collector."""
    gc.disable()
    try:
        sampler = bound_to(holding("cpu", "eager"), logits=normal(R, 0))
        sampler.sample(sampler.plan(range(R), "full"), normal(R, 0), torch.arange(R))
        plan = sampler.plan(range(R), num_drafts=[1] * R)
        for replaced in (plan, dataclasses.replace(plan, slot_ids=torch.arange(R))):
            sampler.verify(replaced, normal(2 * R, 0), torch.zeros(R, dtype=torch.int64), torch.arange(R))
        held = [weakref.ref(sampler._runner._cache), weakref.ref(sampler._verifier)]
        assert held[0]()._variants
        del sampler, plan, replaced
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


def test_what_cannot_be_bound_is_refused_and_what_was_bound_stays(sampler):
    device, good = sampler.device, normal(8, 0).to(sampler.device)
    bound_to(sampler, logits=good)
    for given, error, message in (
        ({"logits": good[:, 1:]}, ValueError, r"logits must be \[R, >= 300\]"),
        ({"logits": good[:0]}, ValueError, "buffer must have at least one row"),
        ({"positions": torch.zeros(2, 2, dtype=torch.int64, device=device)}, ValueError, r"positions must be \[>= 1\]"),
        ({"slots": torch.zeros(0, dtype=torch.int64, device=device)}, ValueError, r"slots must be \[>= 1\]"),
        ({"slots": torch.zeros(2, device=device)}, TypeError, "slots must be torch.int64 or torch.int32"),
        ({"slots": torch.zeros(9, dtype=torch.int64, device=device)[1:]}, ValueError, "slots must be contiguous"),
        ({"draft_token_ids": torch.zeros(2, 5, dtype=torch.int64, device=device)}, ValueError, "form of a prepared"),
        ({"out": samples(2, device)._replace(token_ids=torch.tensor(1, device=device))}, ValueError, r"\[>= 1\]"),
        ({"out": good}, TypeError, "out must be SampleOutputs or VerifyOutputs, got Tensor"),
        ({"out": samples(2, device)._replace(status=None)}, TypeError, r"out\.status must be a torch.Tensor"),
    ):
        with pytest.raises(error, match=message):
            sampler.bind(**given)
    sampler.sample(sampler.plan([0, 1], "full"), good[:2], torch.arange(2, device=device))
    assert in_place(sampler, "logits") == 1
    sampler.unbind()
    sampler.sample(sampler.plan([0, 1], "full"), good[:2], torch.arange(2, device=device))
    assert in_place(sampler, "logits") == 1


def test_what_is_bound_in_turns_may_not_overlap(sampler):
    numbers = torch.zeros(16, dtype=torch.int64, device=sampler.device)
    sampler.bind(positions=numbers[:9])
    with pytest.raises(ValueError, match="memory of its own"):
        sampler.bind(out=samples(8, sampler.device)._replace(token_ids=numbers[8:]))
    results = samples(7, sampler.device)._replace(token_ids=numbers[9:])
    sampler.bind(out=results)
    with pytest.raises(ValueError, match="memory of its own"):
        sampler.bind(positions=numbers)
    sampler.bind(out=samples(8, sampler.device))
    sampler.bind(positions=numbers)  # results that gave way to others are nobody's any more


def test_a_sampler_is_warmed_up_under_inference_mode_and_used_outside(reference):
    sampler, logits, positions = holding("cpu", "eager"), normal(8, 0), torch.arange(8)
    with torch.inference_mode():
        bound_to(sampler, logits=logits, positions=positions)
    found = sampler.sample(sampler.plan(range(R), "full"), logits[:R], positions[:R])
    assert same(found, reference.sample(reference.plan(range(R), "full"), logits[:R], positions[:R]))


def test_capture_seen_says_what_took_its_place():
    with pytest.warns(DeprecationWarning, match=r"bind\(logits=, positions=, out=\) before warmup"):
        assert holding("cpu", "eager").capture_seen() == 0


@pytest.mark.gpu
def test_an_engine_captures_a_plan_that_no_step_has_used(reference):
    sampler = holding("cuda", "graph")
    sampler.warmup(modes=["full"])
    logits, positions = normal(R, 0).cuda(), torch.arange(R, device="cuda")
    plan = sampler.plan(range(R), "full")
    sampler.plan([0, 1], "full")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sampler.sample(plan, logits, positions)
    for seed in range(3):
        logits.copy_(normal(R, seed))
        junk = [torch.full((64,), -7, device="cuda") for _ in range(64)]
        graph.replay()
        assert same(drawn, reference.sample(reference.plan(range(R), "full"), logits.cpu(), positions.cpu()))
        del junk
    assert torch.equal(plan.slot_ids.cpu(), torch.arange(R))
