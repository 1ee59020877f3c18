"""Edits that users write: in every step and backend what the function makes of the logits before the sampler.

Their state by slot is read by every step where it lies, written by the engine, new for each request.
"""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch

from compiled_sampler import LogitEdit, RowStatus, Sampler, SamplingParams, Verification
from compiled_sampler.batch import tensors_of
from compiled_sampler.engine.requests.custom_edits import EditStates
from compiled_sampler.modes import RULES
from tests.builders.custom_edits import (
    EDITS,
    Text,
    V,
    custom_sampler,
    edited_before,
    params_with,
    random_inputs,
    row_of,
)
from tests.builders.edit_states import EDITS as STATEFUL
from tests.builders.edit_states import edited_before as edited_by_state
from tests.builders.edit_states import initial_states, random_states, stateful_sampler, write_states
from tests.builders.edit_states import params_with as stateful_params
from tests.builders.edits import random_mask
from tests.builders.sampler import (
    SHARED_SLOTS,
    held,
    nothing_compiles,
    only_replays,
    planned,
    recorded,
    stages_stay_eager,
)
from tests.tiers import tiers

PROMPT = [3, 10, 4, 4]


@dataclass(frozen=True)
class EveryParams:
    """Numbers, of which 0 and 1 are none."""

    count: int
    least: int = 2

    def __post_init__(self):
        if self.count < self.least:
            raise ValueError("count")


@dataclass(frozen=True)
class Every(LogitEdit):
    """1 less for some tokens; it divides by its parameters, which raises where one is 0."""

    params = EveryParams

    def edit(self, x, ids, rows):
        return torch.where(ids % rows.params["count"] < ids // rows.params["least"] % 2, x - 1.0, x)


def test_rows_without_an_edit_read_numbers_that_a_request_may_have():
    sampler, plain = Sampler(V, 3, backend="eager", edits=[Every()]), Sampler(V, 3, backend="eager")
    has = sampler.add_request(SamplingParams(seed=1, extra_args={"Every": {"count": 3}}))
    has_not = sampler.add_request(SamplingParams(seed=2))
    again = plain.add_request(SamplingParams(seed=2))
    logits, positions = torch.zeros(3, V), torch.tensor([0, 0, 0])
    drawn = sampler.sample(sampler.plan([has, has_not, -1]), logits, positions).tolist()
    assert drawn[1:] == plain.sample(plain.plan([again, -1]), logits[:2], positions[:2]).tolist()
    sampler.remove_request(has)
    assert sampler.add_request(SamplingParams(seed=3)) == has  # the slot that padding reads
    late = sampler.add_request(SamplingParams(seed=1, extra_args={"Every": {"count": 3}}))
    assert sampler.sample(sampler.plan([-1, late]), logits[:2], positions[:2]).tolist() == [-1, drawn[0]]


def test_masks_act_before_and_after_and_the_library_s_edits_before():
    """A mask that an edit would lift stays; a bias is seen by the edit."""
    sampler, (plain, plan_of) = custom_sampler("eager", 1), planned(SamplingParams(seed=1))
    own = {"seed": 1, "logit_bias": {8: 2.5, 64: -1.0}, "allowed_token_ids": range(1, V)}
    plan = sampler.plan([sampler.add_request(params_with([*EDITS], **own), PROMPT)])
    logits, inputs, mask = torch.randn(1, V), random_inputs(1, 0), random_mask(random.Random(4), 1, V)
    bits = ((mask[:, torch.arange(V) >> 5] >> (torch.arange(V) & 31)) & 1 != 0) & (torch.arange(V) > 0)
    biased = torch.where(bits, logits, float("-inf"))
    biased[0, 8] += 2.5
    biased[0, 64] -= 1.0
    wanted = torch.where(bits, edited_before(biased, [Text([*EDITS], PROMPT, row_of(inputs, 0))]), float("-inf"))
    given = {"token_bitmask": mask, "edit_inputs": inputs}
    assert torch.equal(sampler.edited_logits(plan, logits, torch.tensor([4]), **given), wanted)
    drawn = sampler.sample(plan, logits, torch.tensor([4]), **given)
    assert drawn.tolist() == plain.sample(plan_of, wanted, torch.tensor([4])).tolist()
    for of_call in (given, {"edit_inputs": inputs}):
        wanted_ids = sampler.sample(plan, logits, torch.tensor([4]), **of_call).tolist()
        for leave in (True, "restore"):
            written = logits.clone()
            again = sampler.sample(plan, written, torch.tensor([4]), consume_logits=leave, **of_call)
            assert again.tolist() == wanted_ids
            assert torch.equal(written, logits) == (leave == "restore")


def test_rows_of_other_requests_keep_their_bits():
    """NaN, infinities and denormals too; and a batch without the edits has no step with them."""
    sampler = custom_sampler("eager", 3)
    slots = [sampler.add_request(params_with(["NoDigits"], seed=n) if n == 1 else SamplingParams()) for n in range(3)]
    logits = torch.randn(3, V)
    logits[:, :6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-40, -0.0, 1e30])
    found = sampler.edited_logits(sampler.plan(slots), logits, torch.zeros(3, dtype=torch.int64))
    for row in (0, 2):
        assert torch.equal(found[row].view(torch.int32), logits[row].view(torch.int32))
    assert sampler.plan(slots).edits == ("NoDigits",)
    assert sampler.plan([slots[0], slots[2], -1]).edits == ()


def test_what_an_edit_makes_of_nan_and_denormals():
    """A NaN that it masks is not reported; a denormal result counts as 0."""
    sampler = custom_sampler("eager", 1)
    plan = sampler.plan([sampler.add_request(params_with(["Stepped"], seed=1))])
    logits, inputs = torch.randn(1, V), random_inputs(1, 0)
    inputs["blocked"][:] = torch.arange(V) == 2
    inputs["number"][:] = 0
    logits[0, 2], logits[0, 60] = float("nan"), 1.2e-38  # times 0.75 is a denormal, less 1
    position = torch.zeros(1, dtype=torch.int64)
    assert sampler.sample(plan, logits, position, edit_inputs=inputs).status.tolist() == [0]
    logits[0, 5] = float("nan")
    assert sampler.sample(plan, logits, position, edit_inputs=inputs).status.tolist() == [RowStatus.NAN_SEEN]
    logits[0, 1] = 1e-40
    assert sampler.edited_logits(plan, logits, position, edit_inputs=inputs)[0, 1] == 0.0


def test_a_warmed_up_sampler_compiles_nothing_in_a_step():
    """Stages of the user's edits are compiled with the others, ahead of the first step, for one row and for several."""
    sampler = custom_sampler("compiled", SHARED_SLOTS, captured_edits=[["Guidance", "GreenList", "NoDigits"]])
    with stages_stay_eager():
        sampler.warmup(modes=["greedy"])
    wanted = custom_sampler("eager", 3)
    slots, others = (
        [each.add_request(params_with(["Guidance", "GreenList"], temperature=0.0), PROMPT) for _ in range(3)]
        for each in (sampler, wanted)
    )
    with nothing_compiles():
        for rows in (1, 3):
            logits, positions, inputs = torch.randn(rows, V), torch.full((rows,), 4), random_inputs(rows, rows)
            found, told = (
                each.sample(each.plan(own[:rows]), logits, positions, edit_inputs=inputs).tolist()
                for each, own in ((sampler, slots), (wanted, others))
            )
            assert found == told


# State by slot.


POSITIONS = torch.tensor([4, 9, 4, 7])


EACH = [*itertools.product(("reference", "eager"), (["RequestMask"], ["RunningBias"], [*STATEFUL]))]


@pytest.mark.parametrize(("backend", "edits"), tiers(EACH, [("compiled", [*STATEFUL])]), ids=str)
def test_every_step_reads_the_state_of_its_rows(backend, edits):
    """Slot 0 has no edit, slots 1 and 2 have edits, and a row is padding: by every kind of step and rule."""
    given = {"temperature": 0.9, "seed": 5}
    sampler, plain = stateful_sampler(backend, 3), Sampler(V, 3, backend="eager")
    slots = [sampler.add_request(stateful_params(edits if n else (), **given)) for n in range(3)]
    others = [plain.add_request(SamplingParams(**given)) for _ in slots]
    batch, batch_of = [slots[2], -1, slots[0], slots[1]], [others[2], -1, others[0], others[1]]
    states, rows = random_states(3, 3), [(edits, 2), ([], 0), ([], 0), (edits, 1)]
    write_states(sampler, states)
    plan, plan_of = sampler.plan(batch), plain.plan(batch_of)
    generator = torch.Generator().manual_seed(1)
    logits = 2.0 * torch.randn(4, V, generator=generator)
    edited = edited_by_state(logits, rows, states)
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
    of_target = edited_by_state(
        target, [row for row, n in zip(rows, counts, strict=True) for _ in range(n + 1)], states
    )
    of_drafts = edited_by_state(
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
    slot = sampler.add_request(stateful_params([*STATEFUL], seed=1))
    write_states(sampler, random_states(2, 8))
    sampler.remove_request(slot)
    assert sampler.add_request(stateful_params([*STATEFUL], seed=2)) == slot
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
    assert torch.equal(found, edited_by_state(logits, [([*STATEFUL], 0)], random_states(2, 8)))
    assert not torch.equal(found, logits)


def test_what_an_engine_writes_counts_from_the_next_step_on():
    """Right after the request was added, between two steps of one plan, and for other requests never."""
    sampler = stateful_sampler("eager", 2)
    slots = [sampler.add_request(stateful_params(["RunningBias"], temperature=0.0)) for _ in range(2)]
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
    slot = sampler.add_request(stateful_params(["RunningBias"], seed=1))
    written = {name: sampler.edit_state(name)._version for name in initial_states(1)}
    sampler.add_request(stateful_params(["RequestMask"], seed=1))
    plan, drafted = sampler.plan([slot]), sampler.plan([slot], num_drafts=[1])
    sampler.sample(plan, torch.randn(1, V), torch.tensor([0]))
    sampler.verify(drafted, torch.randn(2, V), torch.tensor([[1]]), torch.tensor([1]))
    found = {name: sampler.edit_state(name)._version - count for name, count in written.items()}
    assert found == {"words": 1, "bias": 0, "weight": 0, "acts": 0, "groups": 0}


def test_gradients_of_what_an_engine_writes_reach_no_step_and_no_request():
    """Neither where its tensor is a leaf that requires grad, nor where it wrote what does."""
    sampler, logits, position = stateful_sampler("eager", 2), torch.randn(1, V), torch.tensor([0])
    slot, bias = sampler.add_request(stateful_params(["RunningBias"], seed=1)), sampler.edit_state("bias")
    bias[slot] = torch.full((V,), 2.0, requires_grad=True)
    weight = sampler.edit_state("weight").requires_grad_()
    edited = sampler.edited_logits(sampler.plan([slot]), logits, position)
    assert torch.equal(edited, logits + 1.0)
    assert not edited.requires_grad
    sampler.remove_request(slot)
    assert sampler.add_request(stateful_params(["RunningBias"], seed=1)) == slot
    assert torch.equal(sampler.edited_logits(sampler.plan([slot]), logits, position), logits)
    assert (sampler.edit_state("bias") is bias, weight[slot].item()) == (True, 0.5)


def test_recorded_steps_read_what_was_written_after_they_were_recorded():
    """Recorded with both edits before any request was there, for batches with fewer of them too."""
    ways = [Verification("match", 2), Verification("rejection", 2)]
    made = recorded(stateful_sampler("eager", 4, buckets=[4], captured_edits=[[*STATEFUL]], verifications=ways))
    wanted = stateful_sampler("eager", 4)
    for edits in (["RunningBias"], [*STATEFUL]):
        params = [stateful_params(edits, top_p=0.9, seed=n) for n in range(3)]
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
    count = 3 * (4 * -(-V // 32) + 4 * V + 2 + 1 + 8 * 6)
    assert stateful_sampler("eager", 3).statistics().edit_bytes == count
    assert custom_sampler("eager", 3).statistics().edit_bytes == 0
