"""Logprobs on a GPU: captured, inside an engine's graph, without a wait or an allocation, as on the CPU."""

import random

import pytest
import torch

from compiled_sampler import LogprobOutputs, Logprobs, SampleOutputs, Verification
from compiled_sampler.batch import tensors_of
from compiled_sampler.modes import RULES
from tests.builders.edits import BOUNDED_EDITS, V, edited_sampler, hard_logits, random_mask, random_request
from tests.builders.logprobs import EVERYTHING, differing
from tests.torch_states import no_waits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
ROWS, K = 24, 2


@pytest.fixture(scope="module")
def captured():
    """A sampler on the GPU whose steps are captured with each law, with all edits and without."""
    options = {
        "captured_edits": [BOUNDED_EDITS, ("token_bitmask", *BOUNDED_EDITS)],
        "captured_logprobs": EVERYTHING,
        "verifications": [Verification(rule, K) for rule in RULES],
    }
    made = edited_sampler("graph", ROWS, device="cuda", buckets=[ROWS], **options)
    made.warmup(modes=["full"])
    return made


@pytest.mark.parametrize("wanted", EVERYTHING, ids=lambda each: each.of)
@pytest.mark.parametrize("edits", [(), BOUNDED_EDITS])
def test_captured_steps_return_what_the_cpu_returns(captured, edits, wanted):
    source, reference = random.Random(f"{edits} {wanted.of}"), edited_sampler("eager", ROWS)
    generator = torch.Generator().manual_seed(source.randrange(2**31))
    before = captured.statistics()
    for number in range(3):
        requests = [random_request(source, V, edits) for _ in range(ROWS)]
        mask = random_mask(source, ROWS * (K + 1), V) if edits and number else None
        rows, drafts = hard_logits(source, ROWS * (K + 1)), torch.randint(-1, V + 1, (ROWS, K), generator=generator)
        positions, results = torch.tensor([each.position for each in requests]), []
        for sampler in (captured, reference):
            slots = [each.added(sampler) for each in requests]
            plans, there = (sampler.plan(slots), sampler.plan(slots, num_drafts=[K] * ROWS)), sampler.device
            x, ids, where = (each.to(there) for each in (rows, drafts, positions))
            words = None if mask is None else mask.to(there)
            few = None if words is None else words[:ROWS]
            made = [sampler.sample(plans[0], x[:ROWS], where, token_bitmask=few, logprobs=wanted)]
            made += [
                sampler.verify(plans[1], x, ids, where, rule, token_bitmask=words, logprobs=wanted) for rule in RULES
            ]
            results.append(made)
            for slot in slots:
                sampler.remove_request(slot)
        for step, found, told in zip(("sample", *RULES), *results, strict=True):
            assert [each.tolist() for each in found[:2]] == [each.tolist() for each in told[:2]], step
            assert differing(found.logprobs, told.logprobs) == [], (step, number, found.logprobs, told.logprobs)
    after = captured.statistics()
    assert (after.captures, after.direct_runs) == (before.captures, before.direct_runs)


def test_a_captured_step_neither_waits_nor_allocates(captured):
    source, wanted = random.Random(1), EVERYTHING[2]
    slots = [random_request(source, V, ()).added(captured) for _ in range(ROWS)]
    plan, logits = captured.plan(slots), torch.randn(ROWS, V, device="cuda")
    positions = torch.arange(ROWS, device="cuda")
    made = captured.sample(plan, logits, positions, logprobs=wanted)
    out = SampleOutputs(
        made.token_ids.clone(), made.status.clone(), logprobs=LogprobOutputs(*map(torch.clone, made.logprobs))
    )
    captured.sample(plan, logits, positions, out, logprobs=wanted)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_waits():
        for _ in range(3):
            captured.sample(plan, logits, positions, out, logprobs=wanted)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    for slot in slots:
        captured.remove_request(slot)


@pytest.mark.parametrize("wanted", [EVERYTHING[1], Logprobs(token_ids=(7, 1, 2, 9))])
def test_a_step_inside_an_engines_graph_returns_what_the_cpu_returns(captured, wanted):
    """Also the logprobs of ids that were not on the device before, which the graph fills in."""
    source, reference = random.Random(4), edited_sampler("eager", ROWS)
    requests = [random_request(source, V, ()) for _ in range(ROWS)]
    sides = [(each, [r.added(each) for r in requests]) for each in (captured, reference)]
    plans = [each.plan(slots) for each, slots in sides]
    logits, positions = torch.zeros(ROWS, V, device="cuda"), torch.arange(ROWS, device="cuda")
    captured.sample(plans[0], logits, positions, logprobs=wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.sample(plans[0], logits, positions, logprobs=wanted)
    for _ in range(3):
        rows = hard_logits(source, ROWS)
        logits.copy_(rows)
        graph.replay()
        told = reference.sample(plans[1], rows, positions.cpu(), logprobs=wanted)
        assert len(tensors_of(out)) == len(tensors_of(told))
        assert torch.equal(out.token_ids.cpu(), told.token_ids)
        assert differing(out.logprobs, told.logprobs) == []
    for sampler, slots in sides:
        for slot in slots:
            sampler.remove_request(slot)
