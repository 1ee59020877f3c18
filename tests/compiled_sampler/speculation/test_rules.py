"""Verification at its corners: certain and impossible drafts, ids that are none, NaN, residuals that are rare or none.

Where nothing is certain, the tests compare with the plain sampler. None is statistical: the law is in
test_verification_law.py and test_verification_draws.py, and hard rows and padding are in test_reference.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler.batch import RowStatus, SampleInputs, VerifyInputs, VerifyOutputs, tensors_of
from compiled_sampler.core.noise import RESIDUAL
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import PROPOSALS, RULES, Mode, probabilities_mode, verifying
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.verify import verify_step
from compiled_sampler.speculation import acceptance, emission
from compiled_sampler.speculation.reference import verify as definition
from tests.builders.inputs import covering_modes, full_mode, repeated
from tests.builders.logprobs import on_device
from tests.builders.sampler import same
from tests.builders.verifications import verify_inputs
from tests.tiers import tiers

V = 100
PLAIN = [SamplingParams(seed=3), SamplingParams(seed=4, temperature=0.7, top_p=0.9, min_p=0.01)]
JUDGING = ("rejection", "block")
EVERY_WAY = pytest.mark.parametrize(("rule", "kind"), [(rule, kind) for rule in RULES for kind in PROPOSALS])
EVERY_RULE = pytest.mark.parametrize("rule", JUDGING)


def proposals(kind: str, drafts: Tensor) -> Tensor | None:
    """Random rows of proposals of a kind, from which drafts ``[N, K]`` are likely to be drawn."""
    logits = torch.randn(drafts.numel(), V).scatter_(1, drafts.view(-1, 1), 3.0)
    return {"one_hot": None, "logits": logits, "probabilities": torch.softmax(logits, -1)}[kind]


def verified(rule: str, kind: str, *given: Any, params: list[SamplingParams] = PLAIN) -> VerifyOutputs:
    return verify_step(verifying(full_mode(V), rule, kind), verify_inputs(*given, params=params, vocab_size=V))


def drawn(inputs: VerifyInputs, mode: Mode | None = None) -> Tensor:
    """What the sampler draws at each row of requests with as many drafts each: int64 ``[N, K + 1]``."""
    count, rows = len(inputs.slots), len(inputs.logits) // len(inputs.slots)
    slots = inputs.slots.repeat_interleave(rows)
    positions = inputs.positions[:, None] + torch.arange(rows)
    sampled = SampleInputs(inputs.logits, slots, positions.flatten(), inputs.table)
    return sample_step(mode or full_mode(V), sampled).token_ids.view(count, rows)


def certain(tokens: Tensor) -> Tensor:
    return torch.full((*tokens.shape, V), -torch.inf).scatter(-1, tokens[..., None], 1.5)


@EVERY_WAY
@pytest.mark.parametrize("is_wrong", [False, True])
def test_certain_drafts_are_accepted_and_those_past_the_first_rejection_match_alone(rule, kind, is_wrong):
    drafts = torch.randint(0, V, (20, 3))
    wanted = drafts.clone()
    wanted[:, 0] = (wanted[:, 0] + is_wrong) % V
    given = torch.cat([certain(wanted), torch.randn(20, 1, V)], 1), drafts, proposals(kind, drafts)
    result, own = verified(rule, kind, *given), drawn(verify_inputs(*given, params=PLAIN))
    assert own[:, :3].equal(wanted)
    if is_wrong:
        own[:, 1:] = -1
    assert result.token_ids.equal(own)
    counts = [{1}, {0}, {2}, {0}] if is_wrong else [{4}, {3}, {3}, {0}]
    assert [set(values.tolist()) for values in tensors_of(result)[1:]] == counts


@EVERY_WAY
@pytest.mark.parametrize("bad", [-1, V, 2**40])
def test_a_draft_that_is_no_token_id_is_rejected_and_never_read(rule, kind, bad):
    drafts = torch.randint(0, V, (8, 3))
    logits = torch.cat([certain(drafts[:, :1]), torch.randn(8, 3, V)], 1)
    wide = torch.cat([logits, torch.full((8, 4, 4), torch.nan)], -1)
    q = proposals(kind, drafts)
    drafts[:, 1] = bad
    result, own = verified(rule, kind, wide, drafts, q), drawn(verify_inputs(wide, drafts, params=PLAIN, vocab_size=V))
    assert result.token_ids[:, :2].equal(own[:, :2])
    assert (result.token_ids[:, 2:] == -1).all()
    assert set(result.status.tolist()) == {int(RowStatus.DRAFT_OUT_OF_RANGE)}
    if q is not None:
        q[1::3] = torch.nan
        assert same(verified(rule, kind, wide, drafts, q), result)


@EVERY_WAY
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_masked_row_ends_a_request_without_a_token(rule, kind, row):
    drafts = torch.randint(0, V, (6, 2))
    logits = torch.cat([certain(drafts), torch.randn(6, 1, V)], 1)
    logits[:, row] = torch.tensor([-torch.inf, torch.nan])[torch.arange(V) % 2]
    result = verified(rule, kind, logits, drafts, proposals(kind, drafts))
    assert result.token_ids.tolist() == [[*tokens[:row], *[-1] * (3 - row)] for tokens in drafts.tolist()]
    assert set(result.num_emitted.tolist()) == set(result.num_accepted.tolist()) == {row}
    zero = RowStatus.ZERO_RESIDUAL if rule != "match" and row < 2 else 0
    assert set(result.status.tolist()) == {int(RowStatus.ALL_MASKED | RowStatus.NAN_SEEN | zero)}


@EVERY_WAY
@pytest.mark.parametrize(("flag", "value"), [(RowStatus.NAN_SEEN, torch.nan), (RowStatus.POSITIVE_INFINITY, torch.inf)])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_flags_are_those_of_the_rows_whose_tokens_are_emitted(rule, kind, flag, value, row):
    drafts = torch.randint(1, V, (6, 2))
    logits = certain(torch.cat([drafts[:, :1], torch.zeros(6, 1, dtype=torch.int64), drafts[:, 1:]], 1))
    marked = logits[:, row] > 0 if value == torch.inf else logits[:, row] < 0
    logits[:, row] = torch.where(marked, value, logits[:, row])
    result = verified(rule, kind, logits, drafts, proposals(kind, drafts))
    assert result.token_ids.tolist() == [[d, 0, -1] for d in drafts[:, 0].tolist()]
    assert set(result.status.tolist()) == {int(flag) if row < 2 else 0}


@EVERY_RULE
def test_strange_draft_probabilities_count_as_the_nearest(rule):
    """What is no number or negative weighs nothing, and more than 1 counts as 1."""
    mode, q = verifying(full_mode(V), rule, "probabilities"), torch.softmax(torch.randn(180, V), -1)
    drafts = torch.multinomial(q, 1).view(60, 3)
    inputs = verify_inputs(2.0 * torch.randn(60, 4, V), drafts, q, params=PLAIN)
    usual, where = verify_step(mode, inputs), torch.rand(q.shape) < 0.3
    for values, counts in (((torch.nan, -0.5, -torch.inf), 0.0), ((1.5, torch.inf), 1.0)):
        strange = torch.tensor(values)[torch.randint(len(values), q.shape)]
        found = verify_step(mode, inputs._replace(proposals=torch.where(where, strange, q)))
        nearest = inputs._replace(proposals=torch.where(where, counts, q))
        assert same(found, verify_step(mode, nearest))
        assert same(found, definition(mode, nearest))
        assert not same(found, usual)


@EVERY_RULE
@pytest.mark.parametrize(("kind", "temperature"), [("one_hot", 0.01), ("logits", 0.01), ("logits", 1.0)])
def test_drafts_of_the_targets_own_law_are_always_accepted(rule, kind, temperature):
    rows = torch.randn(100, 21, V)
    rows[..., 7] += 6.0 * (temperature < 1.0)
    params, own = SamplingParams(seed=1, temperature=temperature), rows[:, :-1].flatten(0, 1)
    drafts = sample_step(full_mode(V), repeated(own, params, 2000)).token_ids.view(100, 20)
    result = verified(rule, kind, rows, drafts, None if kind == "one_hot" else own, params=[params])
    assert set(result.num_accepted.tolist()) == {20}


@EVERY_RULE
@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_a_draft_whose_probability_is_off_by_an_ulp_is_accepted(rule, ulps):
    """But for one of 2**24."""
    q = torch.full((1000, 1, V), 0.0)
    q[..., :2] = 0.5
    q[..., 0] = torch.nextafter(q[..., 0], torch.tensor(float(ulps))) if ulps else q[..., 0]
    rows = torch.where(q > 0.0, 0.0, -torch.inf).repeat(1, 2, 1)
    out = verified(rule, "probabilities", rows, torch.zeros(1000, 1, dtype=torch.int64), q, params=PLAIN[:1])
    assert out.num_accepted.tolist() == [1] * 1000
    assert out.status.tolist() == [0] * 1000


# A draft that its proposal gives no weight cannot have been drawn from it, so no test of p / q is lossless for it: it
# is rejected and flagged, and the token is the target's own draw there, as of a block that ends before it.


COUNT = 80
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "a wide top-k": {"top_k": 1000},
    "min-p": {"min_p": 0.3, "temperature": 0.7},
    "top-k and top-p": {"top_k": 20, "top_p": 0.8, "temperature": 1.5},
    "top-p": {"top_p": 0.9},
}


def one_draft(target: Tensor, proposal: Tensor, draft: int, **params: Any) -> VerifyInputs:
    """A request for every row, with one draft that it is judged by; rows after drafts hold zeros."""
    logits, drafts = torch.stack([target, torch.zeros_like(target)], 1), torch.full((COUNT, 1), draft)
    return verify_inputs(logits, drafts, proposal, params=[SamplingParams(seed=i, **params) for i in range(COUNT)])


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


@EVERY_RULE
@pytest.mark.parametrize("filtered", FILTERS)
@pytest.mark.parametrize("vocab_size", tiers([129], [2, 2000]))
def test_the_token_is_the_one_that_the_sampler_draws(vocab_size, rule, filtered, monkeypatch):
    params = FILTERS[filtered]
    inputs = one_draft(rows(vocab_size), rows(vocab_size), vocab_size - 1, **params)
    for mode in covering_modes([SamplingParams(**params)], vocab_size):
        out, own = verify_step(verifying(mode, rule, "logits"), inputs), drawn(inputs, mode)[:, 0]
        all_impossible(out)
        assert out.token_ids[:, 0].equal(own)
    if not params:
        monkeypatch.setattr(emission, "TARGET", RESIDUAL)  # the control: other noise
        other = verify_step(verifying(mode, rule, "logits"), inputs)
        assert vocab_size == 2 or not other.token_ids[:, 0].equal(own)


@EVERY_RULE
@pytest.mark.parametrize("rare", [2.0**-12, 2.0**-30])
def test_a_token_with_a_residual_wins_however_rare_it_is(rule, rare):
    law = torch.softmax(rows(129), -1)
    target, proposal = law.clone(), law.clone()
    target[:, -2], proposal[:, -2], proposal[:, -1] = rare, 0.0, rare
    inputs = one_draft(target, proposal, 128)
    out = verify_step(verifying(probabilities_mode(129), rule, "probabilities"), inputs)
    assert out.token_ids[:, 0].tolist() == [127] * COUNT
    assert out.status.tolist() == [0] * COUNT


@EVERY_RULE
def test_a_residual_that_rounding_removes_is_flagged(rule):
    target = torch.full((COUNT, 2000), 1 / 1999)
    target[:, -1] = 0.0
    proposal = target.clone()
    proposal[:, -1] = 2.0**-30
    mode = verifying(probabilities_mode(2000), rule, "probabilities")
    out = verify_step(mode, one_draft(target, proposal, 1999))
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
    proposal = logits[:, :WIDTH] + torch.randn(COUNT, WIDTH, vocab_size)
    likely = proposal.topk(2).indices
    drafts = likely[..., 0].clone()
    drafts[:, place] = likely[:, place, 1]
    logits.scatter_(-1, likely[..., :1], 4.0)
    logits[torch.arange(COUNT), place, drafts[:, place]] = 4.0
    if kind == "probabilities":
        proposal = proposal.softmax(-1)
    proposal[torch.arange(COUNT), place, drafts[:, place]] = value
    return verify_inputs(logits, drafts, proposal, params=[SamplingParams(seed=i, **PARAMS) for i in range(COUNT)])


def cut(inputs: VerifyInputs, place: int) -> VerifyInputs:
    """The same requests, whose blocks end before the draft at ``place``."""
    logits = inputs.logits.unflatten(0, (COUNT, WIDTH + 1))[:, : place + 1].flatten(0, 1)
    proposal = inputs.proposals.unflatten(0, (COUNT, WIDTH))[:, :place].flatten(0, 1)
    return inputs._replace(logits=logits, num_drafts=inputs.num_drafts * 0 + place, proposals=proposal)


PLACES = [
    *((*each, number % WIDTH, False) for number, each in enumerate(NO_WEIGHT.values())),
    *(("probabilities", 0.0, 1, True), ("logits", -torch.inf, 1, True)),
]


@EVERY_RULE
@pytest.mark.parametrize(("kind", "value", "place", "is_whole"), PLACES)
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


@EVERY_RULE
@pytest.mark.parametrize("why", NO_WEIGHT)
def test_the_test_of_the_ratio_alone_would_accept_it(rule, why, monkeypatch):
    """The control: without the rule, ``u * 0 < p`` accepts the draft, for certain."""
    judge_drafts, weight = acceptance.judge_drafts, acceptance.proposal_weight

    def by_ratio_alone(*args: Any, **kwargs: Any) -> acceptance.Judged:
        with monkeypatch.context() as patch:
            patch.setattr(acceptance, "proposal_weight", lambda *given: weight(*given).clamp(min=1e-30))
            return judge_drafts(*args, **kwargs)

    monkeypatch.setattr("compiled_sampler.pipeline.verify.judge_drafts", by_ratio_alone)
    kind, value = NO_WEIGHT[why]
    mode = covering_modes([SamplingParams(**PARAMS)], 64)[0]
    out = verify_step(verifying(mode, rule, kind), blocks(kind, value, 0))
    assert int((out.num_accepted > 0).sum()) == COUNT


@pytest.mark.gpu
@pytest.mark.parametrize("why", ["zero", "dropped by the filters of its own law"])
@pytest.mark.parametrize("rule", JUDGING)
def test_cuda_says_the_same(rule, why):
    kind, value = NO_WEIGHT[why]
    mode, stages = verifying(covering_modes([SamplingParams(**PARAMS)], 64)[0], rule, kind), CompiledStages()
    for place in range(WIDTH):
        inputs = blocks(kind, value, place)
        found = verify_step(mode, on_device(inputs, torch.device("cuda")), stages)
        assert same(verify_step(mode, inputs), VerifyOutputs(*(each.cpu() for each in tensors_of(found))))


@EVERY_RULE
def test_a_greedy_request_accepts_its_own_token_whatever_was_proposed(rule):
    """In the greedy mode no proposal is read, so none may count beside other requests either."""
    target = rows(64)
    own = int(target[0].argmax())
    proposal = torch.full_like(target, -torch.inf)
    proposal[:, 3 if own != 3 else 4] = 0.0
    inputs = one_draft(target, proposal, own, temperature=0.0)
    alone = verify_step(verifying(covering_modes([SamplingParams(temperature=0.0)], 64)[0], rule, "logits"), inputs)
    among = verify_step(verifying(full_mode(64), rule, "logits"), inputs)
    assert same(alone, among)
    assert same(alone, definition(verifying(full_mode(64), rule, "logits"), inputs))
    assert alone.num_accepted[0] == 1
    assert set(alone.status.tolist()) == {0}
