"""Verification on CUDA: eager, compiled, replayed and captured in an engine's graph, equal to eager on the CPU."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import Plan, Sampler, SamplingParams, Verification, VerifyOutputs
from compiled_sampler.batch import tensors_of
from tests.builders import sampler as builders_sampler
from tests.builders.sampler import REQUESTS, same
from tests.torch_states import no_waits

pytestmark = pytest.mark.gpu

V, WIDTH, BUCKETS = 509, 3, (1, 4, 8)
WAYS = (
    Verification("match", WIDTH),
    Verification("rejection", WIDTH, "probabilities"),
    Verification("block", WIDTH, "logits"),
)
MODES = list(REQUESTS)


def holding(device: str, backend: str) -> Sampler:
    """A sampler that holds the request of each mode in the first slots."""
    sampler = Sampler(V, 8, device, backend=backend, buckets=BUCKETS, verifications=WAYS, probabilities=True)
    for params in REQUESTS.values():
        sampler.add_request(params)
    return sampler


@pytest.fixture(scope="module")
def reference() -> Sampler:
    """Eager on the CPU."""
    return holding("cpu", "eager")


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    """Warmed up on CUDA in the mode that covers all, because every other costs most of a minute."""
    made = holding("cuda", "graph")
    made.warmup(modes=["full"])
    return made


@pytest.fixture
def nothing_compiles() -> Iterator[None]:
    """A compilation during the test is an error."""
    with builders_sampler.nothing_compiles():
        yield


def batch(mode: str, count: int, seed: int) -> tuple[list[int], list[int], dict[str, Tensor]]:
    """Slots, numbers of drafts and tensors on the CPU; half of the drafts are the target's likeliest token."""
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    slots = [source.choice([-1, *[MODES.index(mode)] * 5]) for _ in range(count)]
    num_drafts = [source.randint(0, WIDTH) for _ in range(count)]
    rows, proposed = count + sum(num_drafts), sum(num_drafts)
    logits = 3.0 * torch.randn(rows, V, generator=generator)
    judged = [
        row for n, k in enumerate(num_drafts) for row in range(sum(num_drafts[:n]) + n, sum(num_drafts[:n]) + n + k)
    ]
    drafts = torch.full((count, WIDTH), -1)
    at = iter(judged)
    for n, k in enumerate(num_drafts):
        for j in range(k):
            best = int(logits[next(at)].argmax())
            drafts[n, j] = source.choice([best, best, source.randint(-2, V + 2)])
    other = logits[judged] + torch.randn(proposed, V, generator=generator)
    tensors = {
        "logits": logits,
        "drafts": drafts,
        "positions": torch.randint(2**40, (count,), generator=generator),
        "draft_probs": torch.softmax(other, -1),
        "draft_logits": other,
    }
    return slots, num_drafts, tensors


def verified(sampler: Sampler, plan: Plan, tensors: dict[str, Tensor], way: Verification, **more: Any) -> VerifyOutputs:
    """``verify`` with what the drafts were drawn from, on the sampler's device."""
    moved = {name: each.to(sampler.device) for name, each in tensors.items()}
    given = {"probabilities": "draft_probs", "logits": "draft_logits"}.get(way.drafts)
    if given:
        more[given] = moved[given]
    return sampler.verify(plan, moved["logits"], moved["drafts"], moved["positions"], way.rule, **more)


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.rule)
@pytest.mark.parametrize("mode", MODES)
def test_replayed_verifications_equal_eager_torch_on_the_cpu(reference, sampler, mode, way):
    before = sampler.statistics()
    for seed, count in enumerate((1, 2, 4, 8, 5, 1, 7)):
        slots, num_drafts, tensors = batch(mode, count, seed)
        wanted = verified(reference, reference.plan(slots, mode, num_drafts), tensors, way)
        assert same(verified(sampler, sampler.plan(slots, mode, num_drafts), tensors, way), wanted)
    after = sampler.statistics()
    assert (after.replays - before.replays, after.direct_runs) == (7, before.direct_runs)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.rule)
def test_eager_and_compiled_verifications_equal_eager_torch_on_the_cpu(reference, way):
    for backend in ("eager", "compiled"):
        other = holding("cuda", backend)
        for seed, count in enumerate((1, 5, 8)):
            slots, num_drafts, tensors = batch("top_k_top_p[64]", count, seed)
            wanted = verified(reference, reference.plan(slots, None, num_drafts), tensors, way)
            assert same(verified(other, other.plan(slots, None, num_drafts), tensors, way), wanted)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.rule)
def test_a_replay_into_out_neither_allocates_nor_waits(reference, sampler, way):
    slots, num_drafts, tensors = [2, 0, 2, 1], [WIDTH] * 4, batch("min_p", 4, 0)[2]
    plan, given = sampler.plan(slots, "full", num_drafts), {"probabilities": "draft_probs", "logits": "draft_logits"}
    rows, proposed = 4 * (WIDTH + 1), 4 * WIDTH
    logits, drafts = torch.randn(rows, V, device="cuda"), torch.randint(V, (4, WIDTH), device="cuda")
    q = torch.softmax(torch.randn(proposed, V, device="cuda"), -1)
    more = {} if way.drafts == "one_hot" else {given[way.drafts]: q}
    positions = tensors["positions"].cuda()
    count = torch.zeros(4, dtype=torch.int64, device="cuda")
    tokens = torch.zeros(4, WIDTH + 1, dtype=torch.int64, device="cuda")
    out = VerifyOutputs(tokens, count, count.clone(), count.clone(), count.to(torch.int32))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_waits():
        assert sampler.verify(plan, logits, drafts, positions, way.rule, **more, out=out) is out
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    wanted = reference.verify(
        reference.plan(slots, "full", num_drafts), logits.cpu(), drafts.cpu(), positions.cpu(), way.rule,
        **{name: each.cpu() for name, each in more.items()},
    )  # fmt: skip
    assert same(out, wanted)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize("is_flat", [False, True], ids=["padded", "flat"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.rule)
def test_new_plans_of_changing_requests_wait_for_nothing(reference, sampler, way, is_flat):
    """Three steps with plans that nobody made before, of ragged drafts; before each a request leaves for another."""
    sides, before = (reference, sampler), sampler.statistics()
    (slot,) = {each.add_request(REQUESTS["min_p"]) for each in sides}
    slots = [slot, 0, 3, 5, -1, 2]
    for seed in range(3):
        _, num_drafts, tensors = batch("full", len(slots), seed)
        assert len({*num_drafts}) > 1
        if is_flat:
            tensors["drafts"] = torch.cat(
                [row[:count] for row, count in zip(tensors["drafts"], num_drafts, strict=True)]
            )
        results, params = [], SamplingParams(temperature=0.7, top_p=0.9, seed=10 + seed)
        for each in sides:
            there = {name: tensor.to(each.device) for name, tensor in tensors.items()}
            torch.cuda.synchronize()
            with no_waits():
                each.remove_request(slot)
                assert each.add_request(params) == slot
                plan, plan_of = each.plan(slots), each.plan(slots, None, num_drafts)
                drawn = each.sample(plan, there["logits"][: len(slots)], there["positions"])
                results.append((drawn, verified(each, plan_of, there, way)))
        for wanted, found in zip(*results, strict=True):
            assert same(found, wanted)
    for each in sides:
        each.remove_request(slot)
    after = sampler.statistics()
    assert (after.replays - before.replays, after.direct_runs) == (6, before.direct_runs)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.rule)
def test_an_outer_graph_reads_ragged_drafts_at_each_replay(reference, sampler, way):
    plan = sampler.plan([-1] * 8, "full", [WIDTH] * 8)
    plan = dataclasses.replace(plan, slot_ids=plan.slot_ids.clone(), draft_counts=plan.draft_counts.clone())
    buffers = {
        "logits": torch.zeros(plan.num_rows, V, device="cuda"),
        "drafts": torch.full((8, WIDTH), -1, device="cuda"),
        "positions": torch.zeros(8, dtype=torch.int64, device="cuda"),
        "draft_probs": torch.zeros(plan.num_proposals, V, device="cuda"),
        "draft_logits": torch.zeros(plan.num_proposals, V, device="cuda"),
    }
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = verified(sampler, plan, buffers, way)
    for seed in range(4):
        slots, num_drafts, tensors = batch("full", 8, seed)
        plan.slot_ids.copy_(torch.tensor(slots))
        plan.draft_counts.copy_(torch.tensor(num_drafts))
        for name, each in tensors.items():
            buffers[name][: len(each)].copy_(each)
        graph.replay()
        assert same(out, verified(reference, reference.plan(slots, "full", num_drafts), tensors, way))


@pytest.mark.usefixtures("nothing_compiles")
def test_probabilities_and_drafts_equal_those_of_the_cpu(reference, sampler):
    logits, positions = 3.0 * torch.randn(8, V), torch.arange(8)
    for mode in MODES:
        slots = [MODES.index(mode)] * 7 + [-1]
        plans = [each.plan(slots) for each in (reference, sampler)]
        assert torch.equal(sampler.probs(plans[1], logits.cuda()).cpu(), reference.probs(plans[0], logits))
        for coupled in (True, False):
            wanted = reference.draft(plans[0], logits, positions, coupled, offset=2)
            found = sampler.draft(plans[1], logits.cuda(), positions.cuda(), coupled, offset=2)
            assert torch.equal(found.token_ids.cpu(), wanted.token_ids)


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_probabilities_are_verified_as_on_the_cpu(reference, sampler, rule):
    slots, num_drafts, tensors = batch("no_filter", 8, 5)
    target, q = torch.softmax(tensors["logits"], -1), None if rule == "match" else tensors["draft_probs"]
    wanted, found = (
        each.verify_from_probs(
            each.plan(slots, None, num_drafts),
            target.to(each.device),
            tensors["drafts"].to(each.device),
            tensors["positions"].to(each.device),
            None if q is None else q.to(each.device),
            rule,
        )
        for each in (reference, sampler)
    )
    assert same(found, wanted)


def test_a_batch_whose_requests_all_lack_drafts_runs_a_prepared_variant(reference, sampler):
    logits, positions, drafts = torch.randn(4, V), torch.arange(4), torch.empty(4, 0, dtype=torch.int64)
    before = sampler.statistics()
    for rule in ("match", "rejection", "block"):
        plans = [each.plan([1] * 4, None, [0] * 4) for each in (reference, sampler)]
        wanted = reference.verify(plans[0], logits, drafts, positions, rule)
        assert same(sampler.verify(plans[1], logits.cuda(), drafts.cuda(), positions.cuda(), rule), wanted)
    after = sampler.statistics()
    assert (after.replays - before.replays, after.direct_runs) == (3, before.direct_runs)


@pytest.mark.parametrize("mode", ["no_filter", "top_k_top_p[64]"])
def test_proposals_beyond_two_to_the_31_probabilities_are_their_own(mode):
    vocab_size, count = 151_936, 5_000
    rows, proposed = count * (WIDTH + 1), count * WIDTH
    assert proposed * vocab_size > 2**31
    logits = torch.randn(rows, vocab_size, dtype=torch.bfloat16, device="cuda")
    q = torch.empty(proposed, vocab_size, device="cuda").exponential_()
    q /= q.sum(1, keepdim=True)
    drafts, positions = torch.randint(vocab_size, (count, WIDTH), device="cuda"), torch.arange(count, device="cuda")
    looked_at = torch.tensor([0, 3_000, 3_533, 3_534, 4_711, 4_712, count - 1], device="cuda")  # logits, q beyond 2**31
    its_rows, its_proposals = (
        (looked_at[:, None] * n + torch.arange(n, device="cuda")).flatten() for n in (WIDTH + 1, WIDTH)
    )
    layouts = (("cuda", "compiled"), ("cpu", "eager"))
    samplers = [Sampler(vocab_size, 1, device, torch.bfloat16, backend) for device, backend in layouts]
    slots = [each.add_request(REQUESTS[mode]) for each in samplers]
    plans = [
        each.plan([slot] * n, None, [WIDTH] * n)
        for each, slot, n in zip(samplers, slots, (count, len(looked_at)), strict=True)
    ]
    out = samplers[0].verify(plans[0], logits, drafts, positions, "rejection", draft_probs=q)
    few = (logits[its_rows].cpu(), drafts[looked_at].cpu(), positions[looked_at].cpu(), "rejection")
    wanted = samplers[1].verify(plans[1], *few, draft_probs=q[its_proposals].cpu())
    assert same(VerifyOutputs(*(each[looked_at] for each in tensors_of(out))), wanted)
