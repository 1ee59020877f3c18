"""A draft that its proposal gives no weight is rejected and flagged, and the token is the target's own draw there.

It cannot have been drawn from the proposal, so no test of ``p / q`` is lossless for it. Whatever it is, the outcome is
that of a block which ends before it. Nothing is left to chance but which token is drawn, and that is compared bit for
bit.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler.batch import RowStatus, SampleInputs, VerifyInputs, VerifyOutputs, tensors_of
from compiled_sampler.core.noise import RESIDUAL
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import probabilities_mode, verifying
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.verify import verify_step
from compiled_sampler.speculation import acceptance, emission
from compiled_sampler.speculation.reference import verify as definition
from tests.builders.inputs import covering_modes, full_mode, slot_table
from tests.builders.logprobs import on_device
from tests.builders.sampler import same
from tests.tiers import tiers

COUNT, RULES = 200, ("rejection", "block")
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "a wide top-k": {"top_k": 1000},
    "min-p": {"min_p": 0.3, "temperature": 0.7},
    "top-k and top-p": {"top_k": 20, "top_p": 0.8, "temperature": 1.5},
    "top-p": {"top_p": 0.9},
}


def verify_inputs(target: Tensor, proposals: Tensor, draft: int, **params: Any) -> VerifyInputs:
    """A request for every row, with one draft that it is judged by; rows after drafts hold zeros."""
    count, vocab_size = target.shape
    logits = torch.stack([target, torch.zeros_like(target)], 1).flatten(0, 1)
    table = slot_table([SamplingParams(seed=i, **params) for i in range(count)], vocab_size)
    slots = torch.arange(count)
    return VerifyInputs(logits, slots, 5 * slots, slots * 0 + 1, torch.full((count, 1), draft), proposals, table)


def rows(vocab_size: int) -> Tensor:
    """Logits whose last token has no part."""
    torch.manual_seed(vocab_size)
    logits = 2.0 * torch.randn(COUNT, vocab_size)
    logits[:, -1] = -torch.inf
    return logits


def all_impossible(out: VerifyOutputs) -> None:
    assert out.num_emitted.tolist() == [1] * COUNT
    assert out.num_matching.tolist() == [0] * COUNT
    assert out.status.tolist() == [RowStatus.DRAFT_IMPOSSIBLE] * COUNT


@pytest.mark.parametrize("filtered", FILTERS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab_size", tiers([129], [2, 2000]))
def test_the_token_is_the_one_that_the_sampler_draws(vocab_size, rule, filtered):
    params = FILTERS[filtered]
    inputs = verify_inputs(rows(vocab_size), rows(vocab_size), vocab_size - 1, **params)
    for mode in covering_modes([SamplingParams(**params)], vocab_size):
        out = verify_step(verifying(mode, rule, "logits"), inputs)
        all_impossible(out)
        own = sample_step(mode, SampleInputs(inputs.logits[::2], inputs.slots, inputs.positions, inputs.table))
        assert out.token_ids[:, 0].tolist() == own.token_ids.tolist()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_of_probabilities_the_token_is_the_one_of_the_rule_match(rule, temperature):
    law = torch.softmax(rows(129), -1)
    inputs = verify_inputs(law, law, 128, temperature=temperature)
    out = verify_step(verifying(probabilities_mode(129), rule, "probabilities"), inputs)
    all_impossible(out)
    own = verify_step(verifying(probabilities_mode(129), "match"), inputs)
    assert out.token_ids[:, 0].tolist() == own.token_ids[:, 0].tolist()


def test_the_noise_of_the_residual_would_draw_other_tokens(monkeypatch):
    inputs = verify_inputs(rows(129), rows(129), 128)
    mode = covering_modes([SamplingParams()], 129)[0]
    own = sample_step(mode, SampleInputs(inputs.logits[::2], inputs.slots, inputs.positions, inputs.table))
    monkeypatch.setattr(emission, "TARGET", RESIDUAL)
    out = verify_step(verifying(mode, "rejection", "logits"), inputs)
    assert (out.token_ids[:, 0] != own.token_ids).any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rare", [2.0**-12, 2.0**-30])
def test_a_token_with_a_residual_wins_however_rare_it_is(rule, rare):
    law = torch.softmax(rows(129), -1)
    target, proposals = law.clone(), law.clone()
    target[:, -2], proposals[:, -2], proposals[:, -1] = rare, 0.0, rare
    inputs = verify_inputs(target, proposals, 128)
    out = verify_step(verifying(probabilities_mode(129), rule, "probabilities"), inputs)
    assert out.token_ids[:, 0].tolist() == [127] * COUNT
    assert out.status.tolist() == [0] * COUNT


@pytest.mark.parametrize("rule", RULES)
def test_a_residual_that_rounding_removes_is_flagged(rule):
    target = torch.full((COUNT, 2000), 1 / 1999)
    target[:, -1] = 0.0
    proposals = target.clone()
    proposals[:, -1] = 2.0**-30
    mode = verifying(probabilities_mode(2000), rule, "probabilities")
    out = verify_step(mode, verify_inputs(target, proposals, 1999))
    assert out.status.tolist() == [RowStatus.ZERO_RESIDUAL] * COUNT
    assert out.token_ids[:, 0].unique().numel() > COUNT // 2  # of the target's law
    assert int(out.token_ids[:, 0].max()) < 1999


NO_WEIGHT = {
    "zero": ("probabilities", 0.0),
    "not a number": ("probabilities", torch.nan),
    "negative": ("probabilities", -1.0),
    "masked": ("logits", -torch.inf),
    "a logit that is not a number": ("logits", torch.nan),
    "dropped by the filters of its own law": ("logits", -20.0),
}
WIDTH, PARAMS = 3, {"top_k": 20, "top_p": 0.95}


def blocks(kind: str, value: float, place: int, vocab_size: int = 64) -> VerifyInputs:
    """A request for every row, with 3 drafts; the one at ``place`` has no weight in its proposal, but some in p."""
    torch.manual_seed(place)
    logits = torch.randn(COUNT, WIDTH + 1, vocab_size)
    proposals = logits[:, :WIDTH] + torch.randn(COUNT, WIDTH, vocab_size)
    likely = proposals.topk(2).indices
    drafts = likely[..., 0].clone()
    drafts[:, place] = likely[:, place, 1]
    logits.scatter_(-1, likely[..., :1], 4.0)
    logits[torch.arange(COUNT), place, drafts[:, place]] = 4.0
    if kind == "probabilities":
        proposals = proposals.softmax(-1)
    proposals[torch.arange(COUNT), place, drafts[:, place]] = value
    table = slot_table([SamplingParams(seed=i, **PARAMS) for i in range(COUNT)], vocab_size)
    slots = torch.arange(COUNT)
    counts = torch.full((COUNT,), WIDTH)
    return VerifyInputs(logits.flatten(0, 1), slots, 7 * slots, counts, drafts, proposals.flatten(0, 1), table)


def cut(inputs: VerifyInputs, place: int) -> VerifyInputs:
    """The same requests, whose blocks end before the draft at ``place``."""
    logits = inputs.logits.unflatten(0, (COUNT, WIDTH + 1))[:, : place + 1].flatten(0, 1)
    proposals = inputs.proposals.unflatten(0, (COUNT, WIDTH))[:, :place].flatten(0, 1)
    return inputs._replace(logits=logits, num_drafts=inputs.num_drafts * 0 + place, proposals=proposals)


PLACES = [
    *((*each, number % WIDTH, False) for number, each in enumerate(NO_WEIGHT.values())),
    *(("probabilities", 0.0, 1, True), ("logits", -torch.inf, 1, True)),
]


@pytest.mark.parametrize(("kind", "value", "place", "is_whole"), PLACES)
@pytest.mark.parametrize("rule", RULES)
def test_the_outcome_is_that_of_a_block_which_ends_before_it(rule, kind, value, place, is_whole):
    """The draft alone has no weight, or no token of its row has any."""
    inputs = blocks(kind, value, place)
    if is_whole:
        inputs.proposals[place::WIDTH] = value
    for mode in covering_modes([SamplingParams(**PARAMS)], 64):
        out = verify_step(verifying(mode, rule, kind), inputs)
        shorter = verify_step(verifying(mode, rule, kind), cut(inputs, place))
        assert out.token_ids.tolist() == shorter.token_ids.tolist()
        assert out.num_accepted.tolist() == shorter.num_accepted.tolist()
        assert set(out.status.tolist()) == {RowStatus.DRAFT_IMPOSSIBLE}
        assert set(shorter.status.tolist()) == {0}
        assert place == 0 or int(out.num_accepted.max()) == place
    assert same(out, definition(verifying(mode, rule, kind), inputs))


@pytest.mark.parametrize("why", NO_WEIGHT)
@pytest.mark.parametrize("rule", RULES)
def test_the_test_of_the_ratio_alone_would_accept_it(rule, why, monkeypatch):
    """The control: without the rule, ``u * 0 < p`` accepts the draft, for certain."""
    judge_drafts = acceptance.judge_drafts

    def by_ratio_alone(*args: Any, **kwargs: Any) -> acceptance.Judged:
        weight = acceptance.proposal_weight

        def with_weight(*given: Any) -> Tensor:
            return weight(*given).clamp(min=1e-30)

        with monkeypatch.context() as patch:
            patch.setattr(acceptance, "proposal_weight", with_weight)
            return judge_drafts(*args, **kwargs)

    monkeypatch.setattr("compiled_sampler.pipeline.verify.judge_drafts", by_ratio_alone)
    kind, value = NO_WEIGHT[why]
    mode = covering_modes([SamplingParams(**PARAMS)], 64)[0]
    out = verify_step(verifying(mode, rule, kind), blocks(kind, value, 0))
    assert int((out.num_accepted > 0).sum()) == COUNT


@pytest.mark.gpu
@pytest.mark.parametrize("why", ["zero", "dropped by the filters of its own law"])
@pytest.mark.parametrize("rule", RULES)
def test_cuda_says_the_same(rule, why):
    kind, value = NO_WEIGHT[why]
    mode, stages = verifying(covering_modes([SamplingParams(**PARAMS)], 64)[0], rule, kind), CompiledStages()
    for place in range(WIDTH):
        inputs = blocks(kind, value, place)
        found = verify_step(mode, on_device(inputs, torch.device("cuda")), stages)
        assert same(verify_step(mode, inputs), VerifyOutputs(*(each.cpu() for each in tensors_of(found))))


@pytest.mark.parametrize("rule", RULES)
def test_a_greedy_request_accepts_its_own_token_whatever_was_proposed(rule):
    """In the greedy mode no proposal is read, so none may count beside other requests either."""
    target = rows(64)
    own = int(target[0].argmax())
    proposals = torch.full_like(target, -torch.inf)
    proposals[:, 3 if own != 3 else 4] = 0.0
    inputs = verify_inputs(target, proposals, own, temperature=0.0)
    alone = verify_step(verifying(covering_modes([SamplingParams(temperature=0.0)], 64)[0], rule, "logits"), inputs)
    among = verify_step(verifying(full_mode(64), rule, "logits"), inputs)
    assert same(alone, among)
    assert same(alone, definition(verifying(full_mode(64), rule, "logits"), inputs))
    assert alone.num_accepted[0] == 1
    assert set(alone.status.tolist()) == {0}
