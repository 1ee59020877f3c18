"""State by slot of the user's edits: read by every step where it lies, written by the engine, new for each request."""

import itertools

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams, Verification
from compiled_sampler.batch import tensors_of
from compiled_sampler.engine.requests.custom_edits import EditStates
from compiled_sampler.modes import RULES
from tests.builders.custom_edits import custom_sampler
from tests.builders.edit_states import (
    EDITS,
    V,
    edited_before,
    initial_states,
    params_with,
    random_states,
    stateful_sampler,
    write_states,
)
from tests.builders.sampler import held, only_replays, recorded
from tests.tiers import tiers

POSITIONS = torch.tensor([4, 9, 4, 7])


EACH = [*itertools.product(("reference", "eager"), (["RequestMask"], ["RunningBias"], [*EDITS]))]


@pytest.mark.parametrize(("backend", "edits"), tiers(EACH, [("compiled", [*EDITS])]), ids=str)
def test_every_step_reads_the_state_of_its_rows(backend, edits):
    """Slot 0 has no edit, slots 1 and 2 have edits, and a row is padding: by every kind of step and rule."""
    given = {"temperature": 0.9, "seed": 5}
    sampler, plain = stateful_sampler(backend, 3), Sampler(V, 3, backend="eager")
    slots = [sampler.add_request(params_with(edits if n else (), **given)) for n in range(3)]
    others = [plain.add_request(SamplingParams(**given)) for _ in slots]
    batch, batch_of = [slots[2], -1, slots[0], slots[1]], [others[2], -1, others[0], others[1]]
    states, rows = random_states(3, 3), [(edits, 2), ([], 0), ([], 0), (edits, 1)]
    write_states(sampler, states)
    plan, plan_of = sampler.plan(batch), plain.plan(batch_of)
    generator = torch.Generator().manual_seed(1)
    logits = 2.0 * torch.randn(4, V, generator=generator)
    edited = edited_before(logits, rows, states)
    assert not torch.equal(edited, logits)
    found = sampler.edited_logits(plan, logits, POSITIONS)
    assert torch.equal(found[[0, 2, 3]], edited[[0, 2, 3]])
    assert sampler.sample(plan, logits, POSITIONS).tolist() == plain.sample(plan_of, edited, POSITIONS).tolist()
    assert torch.equal(sampler.probs(plan, logits, positions=POSITIONS), plain.probs(plan_of, edited))
    for coupled in (True, False):
        made = sampler.draft(plan, logits, POSITIONS, coupled)
        assert made.token_ids.tolist() == plain.draft(plan_of, edited, POSITIONS, coupled).token_ids.tolist()
    counts = [2, 0, 1, 2]
    target, draft_logits = (2.0 * torch.randn(n, V, generator=generator) for n in (9, 5))
    of_target = edited_before(target, [row for row, n in zip(rows, counts, strict=True) for _ in range(n + 1)], states)
    of_drafts = edited_before(
        draft_logits, [row for row, n in zip(rows, counts, strict=True) for _ in range(n)], states
    )
    drafts = torch.randint(V, (4, 2), generator=generator)
    drafts[:, 0] = torch.stack([each.argmax() for each in of_target[[0, 3, 4, 6]]])
    plans = sampler.plan(batch, num_drafts=counts), plain.plan(batch_of, num_drafts=counts)
    wanted = plain.probs(plans[1], of_target)
    assert torch.equal(sampler.probs(plans[0], target, positions=POSITIONS), wanted)
    for rule in RULES:
        for proposed, proposed_of in ((None, None), (draft_logits, of_drafts)) if rule != "match" else ((None, None),):
            made = sampler.verify(plans[0], target, drafts, POSITIONS, rule, draft_logits=proposed)
            due = plain.verify(plans[1], of_target, drafts, POSITIONS, rule, draft_logits=proposed_of)
            assert [each.tolist() for each in made[:5]] == [each.tolist() for each in due[:5]], (rule, proposed)


def reused_slot(sampler):
    """The edited logits of a second request in a slot whose first one left state behind, and the logits."""
    slot = sampler.add_request(params_with([*EDITS], seed=1))
    write_states(sampler, random_states(2, 8))
    sampler.remove_request(slot)
    assert sampler.add_request(params_with([*EDITS], seed=2)) == slot
    logits, position = torch.randn(1, V, generator=torch.Generator().manual_seed(2)), torch.tensor([0])
    return sampler.edited_logits(sampler.plan([slot]), logits, position), logits


def test_a_request_begins_with_the_initial_state_in_a_slot_that_is_used_again():
    sampler = stateful_sampler("eager", 2)
    found, logits = reused_slot(sampler)
    assert torch.equal(found, logits)
    fresh, left = initial_states(2), random_states(2, 8)
    for name, each in fresh.items():
        assert torch.equal(sampler.edit_state(name)[0], each[0])
        assert torch.equal(sampler.edit_state(name)[1], left[name][1])  # nobody took this slot


def test_without_the_reset_a_request_would_read_what_another_left(monkeypatch):
    monkeypatch.setattr(EditStates, "begin", lambda self, slot, edits: None)
    found, logits = reused_slot(stateful_sampler("eager", 2))
    assert torch.equal(found, edited_before(logits, [([*EDITS], 0)], random_states(2, 8)))
    assert not torch.equal(found, logits)


def test_what_an_engine_writes_counts_from_the_next_step_on():
    """Right after the request was added, between two steps of one plan, and for other requests never."""
    sampler = stateful_sampler("eager", 2)
    slots = [sampler.add_request(params_with(["RunningBias"], temperature=0.0)) for _ in range(2)]
    bias = sampler.edit_state("bias")
    bias[slots[0], 70] = 100.0
    plan, logits, positions = sampler.plan(slots), torch.randn(2, V), torch.tensor([0, 0])
    logits[1, 3] = 90.0
    assert sampler.sample(plan, logits, positions).tolist() == [70, 3]
    bias[slots] = torch.where(torch.arange(V) == 5, 1000.0, 0.0)
    assert sampler.sample(plan, logits, positions).tolist() == [5, 5]
    assert sampler.edit_state("bias") is bias


def test_steps_write_no_state_and_neither_do_requests_without_the_edit():
    sampler = stateful_sampler("eager", 2)
    slot = sampler.add_request(params_with(["RunningBias"], seed=1))
    written = {name: sampler.edit_state(name)._version for name in initial_states(1)}
    sampler.add_request(params_with(["RequestMask"], seed=1))
    plan, drafted = sampler.plan([slot]), sampler.plan([slot], num_drafts=[1])
    sampler.sample(plan, torch.randn(1, V), torch.tensor([0]))
    sampler.verify(drafted, torch.randn(2, V), torch.tensor([[1]]), torch.tensor([1]))
    found = {name: sampler.edit_state(name)._version - count for name, count in written.items()}
    assert found == {"words": 1, "bias": 0, "weight": 0, "acts": 0, "groups": 0}


def test_gradients_of_what_an_engine_writes_reach_no_step_and_no_request():
    """Neither where its tensor is a leaf that requires grad, nor where it wrote what does."""
    sampler, logits, position = stateful_sampler("eager", 2), torch.randn(1, V), torch.tensor([0])
    slot, bias = sampler.add_request(params_with(["RunningBias"], seed=1)), sampler.edit_state("bias")
    bias[slot] = torch.full((V,), 2.0, requires_grad=True)
    weight = sampler.edit_state("weight").requires_grad_()
    edited = sampler.edited_logits(sampler.plan([slot]), logits, position)
    assert torch.equal(edited, logits + 1.0)
    assert not edited.requires_grad
    sampler.remove_request(slot)
    assert sampler.add_request(params_with(["RunningBias"], seed=1)) == slot
    assert torch.equal(sampler.edited_logits(sampler.plan([slot]), logits, position), logits)
    assert (sampler.edit_state("bias") is bias, weight[slot].item()) == (True, 0.5)


def test_recorded_steps_read_what_was_written_after_they_were_recorded():
    """Recorded with both edits before any request was there, for batches with fewer of them too."""
    ways = [Verification("match", 2), Verification("rejection", 2)]
    made = recorded(stateful_sampler("eager", 4, buckets=[4], captured_edits=[[*EDITS]], verifications=ways))
    wanted = stateful_sampler("eager", 4)
    for edits in (["RunningBias"], [*EDITS]):
        params = [params_with(edits, top_p=0.9, seed=n) for n in range(3)]
        with held(made, params) as slots, held(wanted, params) as others, only_replays(made, 6):
            for step in range(3):
                logits, drafts, positions = torch.randn(9, V), torch.randint(V, (3, 2)), torch.full((3,), step)
                results = []
                for each, own in ((made, slots), (wanted, others)):
                    if step:
                        write_states(each, random_states(4, step))
                    drawn = each.sample(each.plan(own, mode="full"), logits[:3], positions)
                    plan = each.plan(own, mode="full", num_drafts=[2] * 3)
                    judged = each.verify(plan, logits, drafts, positions, "rejection")
                    results.append([tensor.tolist() for out in (drawn, judged) for tensor in tensors_of(out)])
                assert results[0] == results[1]


def test_statistics_count_the_bytes_of_state_from_the_start():
    held = 3 * (4 * -(-V // 32) + 4 * V + 2 + 1 + 8 * 6)
    assert stateful_sampler("eager", 3).statistics().edit_bytes == held
    assert custom_sampler("eager", 3).statistics().edit_bytes == 0
