"""Edits that users write on a GPU: captured, and inside an engine's graph, as on the CPU."""

import pytest
import torch

from compiled_sampler import SampleOutputs, Verification
from compiled_sampler.batch import tensors_of
from tests.builders.custom_edits import EDITS, V, added_in_turn, custom_sampler, params_with, random_inputs
from tests.torch_states import no_waits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
ROWS, STEPS, PROMPT = 16, 3, [3, 10, 4, 4]


@pytest.fixture(scope="module")
def captured():
    """A sampler on the GPU whose steps are captured with all edits."""
    ways = [Verification("match", 3), Verification("rejection", 3)]
    options = {"device": "cuda", "buckets": [ROWS], "captured_edits": [[*EDITS]], "verifications": ways}
    made = custom_sampler("graph", ROWS, **options)
    made.warmup(modes=["full"])
    return made


def added(sampler, edits):
    """The slots of requests of which every third has no edit."""
    return added_in_turn(sampler, params_with, edits, ROWS, PROMPT)


@pytest.mark.parametrize("edits", [[*EDITS], ["Guidance", "Stepped"]], ids="+".join)
def test_captured_steps_draw_what_the_cpu_draws(captured, edits):
    wanted, before = custom_sampler("eager", ROWS), captured.statistics()
    sides = [(each, added(each, edits)) for each in (captured, wanted)]
    for step in range(STEPS):
        rows, inputs = torch.randn(4 * ROWS, V) * 2.0, random_inputs(4 * ROWS, step)
        drafts, positions = torch.randint(-1, V + 1, (ROWS, 3)), torch.full((ROWS,), 4 + step)
        results = []
        for sampler, slots in sides:
            there = sampler.device
            given = {name: each.to(there) for name, each in inputs.items()}
            few = {name: each[:ROWS] for name, each in given.items()}
            logits, where = rows.to(there), positions.to(there)
            drawn = sampler.sample(sampler.plan(slots, mode="full"), logits[:ROWS], where, edit_inputs=few)
            plan, rule = sampler.plan(slots, mode="full", num_drafts=[3] * ROWS), ("match", "rejection")[step % 2]
            made = sampler.verify(plan, logits, drafts.to(there), where + 1, rule, edit_inputs=given)
            results.append([each.tolist() for out in (drawn, made) for each in tensors_of(out)])
        assert results[0] == results[1]
    after = captured.statistics()
    assert (after.direct_runs, after.captures) == (before.direct_runs, before.captures)
    for sampler, slots in sides:
        for slot in slots:
            sampler.remove_request(slot)


def test_a_step_lands_in_an_engine_s_graph_and_neither_waits_nor_allocates_in_a_replay():
    """The graph reads the tensors of the call where they are, so that what an engine writes there counts."""
    sampler, wanted = (
        custom_sampler(each, ROWS, device=where) for each, where in (("compiled", "cuda"), ("eager", "cpu"))
    )
    slots, others = added(sampler, [*EDITS]), added(wanted, [*EDITS])
    inputs = {name: each.cuda() for name, each in random_inputs(ROWS, 0).items()}
    logits, positions = torch.randn(ROWS, V).cuda(), torch.full((ROWS,), 4, device="cuda")
    plan, kinds = sampler.plan(slots), (torch.int64, torch.int32, torch.bool)
    out = SampleOutputs(*(torch.zeros(ROWS, dtype=each, device="cuda") for each in kinds))
    sampler.sample(plan, logits, positions, out, edit_inputs=inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.sample(plan, logits, positions, out, edit_inputs=inputs)
    for step in range(STEPS):
        fresh, rows = random_inputs(ROWS, 7 + step), torch.randn(ROWS, V)
        for name, each in fresh.items():
            inputs[name].copy_(each)
        logits.copy_(rows)
        positions.fill_(4 + step)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with no_waits():
            graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        found = wanted.sample(wanted.plan(others), rows, torch.full((ROWS,), 4 + step), edit_inputs=fresh)
        assert [each.tolist() for each in tensors_of(out)] == [each.tolist() for each in tensors_of(found)]
