"""State by slot on a GPU: captured steps read what an engine writes there between replays, as on the CPU."""

import pytest
import torch

from compiled_sampler import SampleOutputs, Sampler, Verification
from compiled_sampler.batch import tensors_of
from tests.builders.custom_edits import added_in_turn
from tests.builders.edit_states import EDITS, V, params_with, random_states, stateful_sampler, write_states
from tests.torch_states import no_waits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
ROWS, STEPS = 16, 3


@pytest.fixture(scope="module")
def captured() -> Sampler:
    """A sampler on the GPU whose steps were captured before any request was there."""
    ways = [Verification("match", 3), Verification("rejection", 3)]
    options = {"device": "cuda", "buckets": [ROWS], "captured_edits": [[*EDITS]], "verifications": ways}
    made = stateful_sampler("graph", ROWS, **options)
    made.warmup(modes=["full"])
    return made


def added(sampler, edits):
    """The slots of requests of which every third has no edit."""
    return added_in_turn(sampler, params_with, edits, ROWS)


@pytest.mark.parametrize("edits", [[*EDITS], ["RunningBias"]], ids="+".join)
def test_captured_steps_draw_what_the_cpu_draws(captured, edits):
    """First with the initial state, which a request of before must not have changed, then with written state."""
    wanted, before = stateful_sampler("eager", ROWS), captured.statistics()
    sides = [(each, added(each, edits)) for each in (captured, wanted)]
    for step in range(STEPS):
        rows = torch.randn(4 * ROWS, V) * 2.0
        drafts, positions = torch.randint(-1, V + 1, (ROWS, 3)), torch.full((ROWS,), step)
        results = []
        for sampler, slots in sides:
            there = sampler.device
            if step:
                write_states(sampler, random_states(ROWS, step))
            logits, where = rows.to(there), positions.to(there)
            drawn = sampler.sample(sampler.plan(slots, mode="full"), logits[:ROWS], where)
            plan, rule = sampler.plan(slots, mode="full", num_drafts=[3] * ROWS), ("match", "rejection")[step % 2]
            made = sampler.verify(plan, logits, drafts.to(there), where + 1, rule)
            results.append([each.tolist() for out in (drawn, made) for each in tensors_of(out)])
        assert results[0] == results[1]
    for sampler, slots in sides:
        for slot in slots:
            sampler.remove_request(slot)
    after = captured.statistics()
    assert (after.direct_runs, after.captures) == (before.direct_runs, before.captures)
    assert after.replays >= before.replays + 2 * STEPS


def test_a_request_in_a_used_slot_is_new_in_an_engine_s_graph_and_nothing_waits():
    """Requests come and go between replays: adding them and writing their state waits for nothing, nor allocates."""
    sampler, wanted = (
        stateful_sampler(each, ROWS, device=where) for each, where in (("compiled", "cuda"), ("eager", "cpu"))
    )
    slots, others = added(sampler, [*EDITS]), added(wanted, [*EDITS])
    logits, positions = torch.randn(ROWS, V).cuda(), torch.full((ROWS,), 4, device="cuda")
    plan, kinds = sampler.plan(slots), (torch.int64, torch.int32, torch.bool)
    out = SampleOutputs(*(torch.zeros(ROWS, dtype=each, device="cuda") for each in kinds))
    sampler.sample(plan, logits, positions, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.sample(plan, logits, positions, out)
    addresses = {name: sampler.edit_state(name).data_ptr() for name in random_states(1, 0)}
    for step in range(STEPS):
        for each, own in ((sampler, slots), (wanted, others)):
            states = {name: part.to(each.device) for name, part in random_states(ROWS, step).items()}
            each.remove_request(own[1])
            torch.cuda.synchronize()
            with no_waits():
                write_states(each, states)
                assert each.add_request(params_with([*EDITS], top_p=0.9, seed=1)) == own[1]  # what is written is gone
                each.flush()
        rows = torch.randn(ROWS, V)
        logits.copy_(rows)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with no_waits():
            graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        found = wanted.sample(wanted.plan(others), rows, torch.full((ROWS,), 4))
        assert [each.tolist() for each in tensors_of(out)] == [each.tolist() for each in tensors_of(found)]
    assert addresses == {name: sampler.edit_state(name).data_ptr() for name in addresses}
