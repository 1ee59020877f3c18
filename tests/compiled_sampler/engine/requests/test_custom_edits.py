"""Edits that users write: in every step and backend what the function makes of the logits before the sampler."""

import random
from dataclasses import dataclass

import torch

from compiled_sampler import LogitEdit, RowStatus, Sampler, SamplingParams
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
from tests.builders.edits import random_mask
from tests.builders.sampler import SHARED_SLOTS, nothing_compiles, planned, stages_stay_eager

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
