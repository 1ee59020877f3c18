"""An edit of logits acts in one place: before sampling, drafting, probabilities and verification alike."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from compiled_sampler import EditRows, LogitEdit
from compiled_sampler.batch import SampleInputs, VerifyInputs
from compiled_sampler.modes import Mode, verifying
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.verify import verify_step
from tests.builders.custom_edits import given_to_all
from tests.builders.inputs import modes_by_name, slot_table
from tests.builders.sampler import SHARED_SLOTS, V, same

N, K = 6, 2
MODES = ("greedy", "no_filter", "min_p", "top_k_top_p[64]", "top_k", "full")
RULES = [("match", "one_hot"), ("rejection", "one_hot"), ("rejection", "logits"), ("block", "probabilities")]
GREEDY, DRAWN = SamplingParams(temperature=0.0, seed=1), SamplingParams(temperature=1.5, seed=2)


@dataclass(frozen=True)
class Mirrored(LogitEdit):
    """Another order of every row: what was likely is unlikely."""

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        """The negated logits."""
        return -x


@dataclass(frozen=True)
class WithoutEven(LogitEdit):
    """Without the tokens of even ids."""

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        """The logits with -inf at even ids."""
        return torch.where((ids & 1) == 0, float("-inf"), x)


EDITS = given_to_all([Mirrored(), WithoutEven()], SHARED_SLOTS, V)


def both_of(logits: Tensor) -> Tensor:
    return torch.where(torch.arange(V) % 2 == 0, float("-inf"), -logits)


def table_of(mode: str):
    return slot_table([GREEDY if mode == "greedy" else DRAWN] * SHARED_SLOTS, V)


def sampled(mode: str, offsets: Tensor | None = None) -> SampleInputs:
    slots = torch.tensor([0, 0, -1, 0])
    return SampleInputs(3.0 * torch.randn(4, V), slots, torch.arange(4), table_of(mode), offsets)


@pytest.mark.parametrize("name", MODES)
def test_sampling_and_probabilities_read_edited_logits(name):
    mode, inputs = modes_by_name(V)[name], sampled(name)
    edited = inputs._replace(logits=both_of(inputs.logits))
    with_edits = inputs._replace(edits=EDITS)
    assert same(sample_step(mode, with_edits), sample_step(mode, edited))
    assert not same(sample_step(mode, inputs), sample_step(mode, edited))
    made, wanted = probability_step(mode, with_edits), probability_step(mode, edited)
    assert torch.equal(made.probabilities, wanted.probabilities)
    assert not torch.equal(probability_step(mode, inputs).probabilities, wanted.probabilities)


def test_drafts_are_drawn_from_edited_logits():
    mode, inputs = modes_by_name(V)["no_filter"], sampled("no_filter", offsets=torch.zeros(4, dtype=torch.int64))
    edited = inputs._replace(logits=both_of(inputs.logits))
    assert same(sample_step(mode, inputs._replace(edits=EDITS)), sample_step(mode, edited))
    assert not same(sample_step(mode, inputs), sample_step(mode, edited))


def verified(mode: Mode) -> VerifyInputs:
    logits, counts = 3.0 * torch.randn(N * (K + 1), V), torch.full((N,), K)
    drafts = torch.randint(V // 2, (N, K)) * 2 + 1  # which both edits keep
    proposals = None if mode.drafts == "one_hot" else torch.randn(N * K, V)
    proposals = torch.softmax(proposals, -1) if mode.drafts == "probabilities" else proposals
    table = table_of(mode.samples_as)
    return VerifyInputs(logits, torch.zeros(N, dtype=torch.int64), torch.arange(N), counts, drafts, proposals, table)


@pytest.mark.parametrize(("rule", "drafts"), RULES)
@pytest.mark.parametrize("name", MODES)
def test_every_rule_judges_edited_logits_of_target_and_drafter(name, rule, drafts):
    mode = verifying(modes_by_name(V)[name], rule, drafts)
    inputs = verified(mode)
    proposals = inputs.proposals
    if proposals is not None and drafts == "logits":
        proposals = both_of(proposals)
    wanted = verify_step(mode, inputs._replace(logits=both_of(inputs.logits), proposals=proposals))
    assert same(verify_step(mode, inputs._replace(edits=EDITS)), wanted)
    assert not same(verify_step(mode, inputs), wanted)
