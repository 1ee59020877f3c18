"""Verification at its corners: certain and impossible drafts, ids that are none, padding, NaN, greedy requests.

Where nothing is certain, the tests compare: ``match`` with the plain sampler, a batch with its requests alone. None is
statistical; the law is in test_verification_law.py and test_verification_draws.py.
"""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from compiled_sampler.batch import RowStatus, SampleInputs, VerifyInputs, VerifyOutputs, tensors_of
from compiled_sampler.modes import PROPOSALS, RULES, Mode, verifying
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.verify import verify_step
from compiled_sampler.speculation.reference import verify as definition
from tests.builders.inputs import BASES, full_mode, mode_table, repeated, slot_table
from tests.builders.sampler import same
from tools.kernels.launches import for_a_gpu

V = 100
PLAIN = [SamplingParams(seed=3), SamplingParams(seed=4, temperature=0.7, top_p=0.9, min_p=0.01)]
MIXED = [
    *PLAIN,
    *(SamplingParams(seed=5, top_k=5), SamplingParams(seed=6, temperature=0.0), SamplingParams(seed=7, top_k=80)),
]
WAYS = [(rule, kind) for rule in RULES for kind in PROPOSALS]
DRAFTED = [(rule, kind) for rule, kind in WAYS if rule != "match" or kind == "one_hot"]
EVERY_WAY = pytest.mark.parametrize(("rule", "kind"), WAYS)

Numbers = Sequence[int] | Tensor


def proposals(kind: str, count: int, drafts: Tensor | None = None) -> Tensor | None:
    """Random rows of proposals of a kind; with drafts ``[N, K]``, rows that these are likely to be drawn from."""
    logits = torch.randn(count, V)
    if drafts is not None:
        logits.scatter_(1, drafts.view(count, 1), 3.0)
    return {"one_hot": None, "logits": logits, "probabilities": torch.softmax(logits, -1)}[kind]


def verify_inputs(
    logits: Tensor,
    drafts: Sequence[Sequence[int]] | Tensor,
    q: Tensor | None = None,
    *,
    num_drafts: Numbers | None = None,
    slots: Numbers | None = None,
    params: Sequence[SamplingParams] = PLAIN,
    vocab_size: int = V,
) -> VerifyInputs:
    """Requests at positions 7, 27, ..., with all drafts, whose slots alternate, unless given."""
    tokens = torch.as_tensor(drafts)
    count, width = tokens.shape
    lengths = torch.full((count,), width) if num_drafts is None else torch.as_tensor(num_drafts)
    where = torch.arange(count) % len(params) if slots is None else torch.as_tensor(slots)
    table = slot_table(params, vocab_size)
    return VerifyInputs(logits.flatten(0, -2), where, 7 + 20 * torch.arange(count), lengths, tokens, q, table)


def verify(rule: str, kind: str, inputs: VerifyInputs, mode: Mode | None = None) -> VerifyOutputs:
    return verify_step(verifying(mode or full_mode(inputs.table.top_k.max().item()), rule, kind), inputs)


def plain(inputs: VerifyInputs) -> list[list[int]]:
    counts = inputs.num_drafts + 1
    slots, positions = (each.repeat_interleave(counts) for each in (inputs.slots, inputs.positions))
    steps = torch.cat([torch.arange(count) for count in counts.tolist()])
    vocab_size = int(inputs.table.top_k.max())
    sampled = SampleInputs(inputs.logits, slots, positions + steps, inputs.table)
    tokens = sample_step(full_mode(vocab_size), sampled).token_ids
    return [part.tolist() for part in tokens.split(counts.tolist())]


def certain(tokens: Tensor, vocab_size: int = V) -> Tensor:
    return torch.full((*tokens.shape, vocab_size), -torch.inf).scatter(-1, tokens[..., None], 1.5)


@EVERY_WAY
def test_certain_drafts_are_accepted_and_the_bonus_is_the_plain_samplers(rule, kind):
    drafts = torch.randint(0, V, (20, 3))
    inputs = verify_inputs(torch.cat([certain(drafts), torch.randn(20, 1, V)], 1), drafts, proposals(kind, 60, drafts))
    result = verify(rule, kind, inputs)
    assert result.token_ids[:, :3].equal(drafts)
    assert result.token_ids[:, 3].tolist() == [tokens[3] for tokens in plain(inputs)]
    assert [set(values.tolist()) for values in tensors_of(result)[1:]] == [{4}, {3}, {3}, {0}]


@EVERY_WAY
def test_acceptances_past_the_first_rejection_count_as_matching_alone(rule, kind):
    drafts = torch.randint(0, V, (20, 3))
    wanted = drafts.clone()
    wanted[:, 0] = (wanted[:, 0] + 1) % V
    logits = torch.cat([certain(wanted), torch.randn(20, 1, V)], 1)
    result = verify(rule, kind, verify_inputs(logits, drafts, proposals(kind, 60, drafts)))
    assert result.token_ids.tolist() == [[token, -1, -1, -1] for token in wanted[:, 0].tolist()]
    assert [set(values.tolist()) for values in tensors_of(result)[1:]] == [{1}, {0}, {2}, {0}]


@EVERY_WAY
@pytest.mark.parametrize("bad", [-1, V, 2**40])
def test_a_draft_that_is_no_token_id_is_rejected_and_never_read(rule, kind, bad):
    drafts = torch.randint(0, V, (8, 3))
    logits = torch.cat([certain(drafts[:, :1]), torch.randn(8, 3, V)], 1)
    wide = torch.cat([logits, torch.full((8, 4, 4), torch.nan)], -1)
    q = proposals(kind, 24, drafts)
    drafts[:, 1] = bad
    inputs = verify_inputs(wide, drafts, q)
    result = verify(rule, kind, inputs)
    wanted = [[d, tokens[1], -1, -1] for d, tokens in zip(drafts[:, 0].tolist(), plain(inputs), strict=True)]
    assert result.token_ids.tolist() == wanted
    assert set(result.status.tolist()) == {int(RowStatus.DRAFT_OUT_OF_RANGE)}
    if q is not None:
        q[1::3] = torch.nan
        assert same(verify(rule, kind, verify_inputs(wide, drafts, q)), result)


@EVERY_WAY
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_masked_row_ends_a_request_without_a_token(rule, kind, row):
    drafts = torch.randint(0, V, (6, 2))
    logits = torch.cat([certain(drafts), torch.randn(6, 1, V)], 1)
    logits[:, row] = torch.tensor([-torch.inf, torch.nan])[torch.arange(V) % 2]
    result = verify(rule, kind, verify_inputs(logits, drafts, proposals(kind, 12, drafts)))
    accepted = [tokens[:row] for tokens in drafts.tolist()]
    assert result.token_ids.tolist() == [[*tokens, *[-1] * (3 - row)] for tokens in accepted]
    assert set(result.num_emitted.tolist()) == set(result.num_accepted.tolist()) == {row}
    zero = RowStatus.ZERO_RESIDUAL if rule != "match" and row < 2 else 0
    assert set(result.status.tolist()) == {int(RowStatus.ALL_MASKED | RowStatus.NAN_SEEN | zero)}


@EVERY_WAY
@pytest.mark.parametrize("flag", [RowStatus.NAN_SEEN, RowStatus.POSITIVE_INFINITY])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_flags_are_those_of_the_rows_whose_tokens_are_emitted(rule, kind, flag, row):
    drafts = torch.randint(1, V, (6, 2))
    logits = certain(torch.cat([drafts[:, :1], torch.zeros(6, 1, dtype=torch.int64), drafts[:, 1:]], 1))
    mark = (logits[:, row] > 0) if flag == RowStatus.POSITIVE_INFINITY else (logits[:, row] < 0)
    logits[:, row] = torch.where(mark, torch.inf if flag == RowStatus.POSITIVE_INFINITY else torch.nan, logits[:, row])
    result = verify(rule, kind, verify_inputs(logits, drafts, proposals(kind, 12, drafts)))
    assert result.token_ids.tolist() == [[d, 0, -1] for d in drafts[:, 0].tolist()]
    assert set(result.status.tolist()) == {int(flag) if row < 2 else 0}


def ragged(kind: str, lengths: Sequence[int], slots: Sequence[int]) -> VerifyInputs:
    """Requests with some drafts: first the target's likeliest token, then the drafter's, which may well be rejected."""
    logits = 2.0 * torch.randn(sum(k + 1 for k in lengths), V)
    peaks = 4.0 * torch.randn(sum(max(k, 0) for k in lengths), V)
    starts = torch.tensor([0, *(k + 1 for k in lengths[:-1])]).cumsum(0)
    drafts = torch.randint(0, V, (len(lengths), 4))
    drafts[torch.arange(4) < torch.tensor(lengths)[:, None]] = peaks.argmax(-1)
    drafts[:, 0] = logits.argmax(-1)[starts.clamp(max=len(logits) - 1)]
    q = {"one_hot": None, "logits": peaks, "probabilities": torch.softmax(peaks, -1)}[kind]
    return verify_inputs(logits, drafts, q, num_drafts=lengths, slots=slots, params=MIXED)


def chosen(inputs: VerifyInputs, requests: Sequence[int]) -> VerifyInputs:
    rows = torch.arange(len(inputs.logits)).split((inputs.num_drafts + 1).tolist())
    own = torch.arange(int(inputs.num_drafts.clamp(min=0).sum())).split(inputs.num_drafts.clamp(min=0).tolist())
    q = None if inputs.proposals is None else inputs.proposals[torch.cat([own[n] for n in requests])]
    logits = inputs.logits[torch.cat([rows[n] for n in requests])]
    index = torch.tensor(requests)
    per_request = (each[index] for each in inputs[1:5])
    return VerifyInputs(logits, *per_request, q, inputs.table)


@EVERY_WAY
@pytest.mark.parametrize("base", BASES)
def test_a_request_gets_the_same_alone_and_in_any_order(rule, kind, base):
    inputs = ragged(kind, [2, 4, 1, 3, 1, 4, 2, 3, 4, 1], [0, 1, 2, 3, 4] * 2)
    mode = full_mode(V, base)
    result = verify(rule, kind, inputs, mode)
    order = torch.randperm(10).tolist()
    for requests in [order, *([n] for n in order)]:
        part = verify(rule, kind, chosen(inputs, requests), mode)
        assert all(a.equal(b[requests]) for a, b in zip(tensors_of(part), tensors_of(result), strict=True))


@EVERY_WAY
@pytest.mark.parametrize(
    "lengths", [[4, 3, 1, 0, 4, 4], [4, 3, -1, 0, 4, 4], [4, 3, 4, 4, -1, -1], [-1, 4, 2, -1, 4, 4]]
)
def test_padding_reads_nothing_and_changes_nothing(rule, kind, lengths):
    slots = [n % 5 if k >= 0 and n != 2 else -1 for n, k in enumerate(lengths)]
    inputs = ragged(kind, lengths, slots)
    result = verify(rule, kind, inputs)
    live = [n for n, slot in enumerate(slots) if slot >= 0]
    without = verify(rule, kind, chosen(inputs, live))
    assert all(a.equal(b[live]) for a, b in zip(tensors_of(without), tensors_of(result), strict=True))
    padding = [n for n, slot in enumerate(slots) if slot < 0]
    assert all((values[padding] == -1).all() for values in tensors_of(result))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_strange_draft_probabilities_count_as_the_nearest(rule):
    """What is no number or negative weighs nothing, and more than 1 counts as 1."""
    mode, q = verifying(full_mode(V), rule, "probabilities"), torch.softmax(torch.randn(180, V), -1)
    inputs = verify_inputs(2.0 * torch.randn(60, 4, V), torch.multinomial(q, 1).view(60, 3), q)
    usual, where = verify_step(mode, inputs), torch.rand(q.shape) < 0.3
    for values, counts in (((torch.nan, -0.5, -torch.inf), 0.0), ((1.5, torch.inf), 1.0)):
        strange = torch.tensor(values)[torch.randint(len(values), q.shape)]
        found = verify_step(mode, inputs._replace(proposals=torch.where(where, strange, q)))
        nearest = inputs._replace(proposals=torch.where(where, counts, q))
        assert same(found, verify_step(mode, nearest))
        assert same(found, definition(mode, nearest))
        assert not same(found, usual)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(("kind", "temperature"), [("one_hot", 0.01), ("logits", 0.01), ("logits", 1.0)])
def test_drafts_of_the_targets_own_law_are_always_accepted(rule, kind, temperature):
    rows = torch.randn(100, 21, V)
    rows[..., 7] += 6.0 * (temperature < 1.0)
    params = SamplingParams(seed=1, temperature=temperature)
    drafts = sample_step(full_mode(V), repeated(rows[:, :-1].flatten(0, 1), params, 2000)).token_ids.view(100, 20)
    q = None if kind == "one_hot" else rows[:, :-1].flatten(0, 1)
    result = verify(rule, kind, verify_inputs(rows, drafts, q, params=[params]))
    assert set(result.num_accepted.tolist()) == {20}


@pytest.mark.parametrize(("rule", "kind"), DRAFTED)
@pytest.mark.parametrize("base", BASES)
def test_greedy_requests_get_the_same_in_every_mode_and_rule(rule, kind, base):
    greedy = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=1, seed=2),
        SamplingParams(temperature=0.0, top_p=0.1),
    ]
    logits = torch.randn(12, 4, V).round()
    drafts = torch.where(torch.rand(12, 3) < 0.6, logits[:, :3].argmax(-1), torch.randint(-1, V, (12, 3)))
    inputs = verify_inputs(logits, drafts, proposals(kind, 36), params=greedy)
    results = [verify(rule, kind, inputs, mode) for mode in mode_table(V, base)]
    wanted = verify("match", "one_hot", inputs._replace(proposals=None), mode_table(V, base)[0])
    assert all(same(result, wanted) for result in results)
    assert wanted.token_ids[:, 0].tolist() == logits[:, 0].argmax(-1).tolist()


FREE = [
    SamplingParams(seed=3),
    SamplingParams(seed=4, temperature=0.4),
    SamplingParams(seed=6, temperature=0.0),
    SamplingParams(seed=7, temperature=1.6),
    SamplingParams(top_k=1),
]


@pytest.mark.parametrize("kind", PROPOSALS)
@pytest.mark.parametrize(
    "lengths", [[0] * 6, [1, 0, 0, 0, 0, 0], [4, 3, -1, 0, 4, 4], [-1, 0, 2, -1, -1, 1], [4] * 6, [0, 4]]
)
def test_without_filters_a_row_that_judges_no_draft_needs_no_law(kind, lengths):
    slots = [n % 5 if k >= 0 and n != 2 else -1 for n, k in enumerate(lengths)]
    inputs = ragged(kind, lengths, slots)._replace(table=slot_table(FREE, V))
    mode = next(mode for mode in mode_table(V, "top_k") if mode.name == "no_filter")
    strange = (None, torch.nan, torch.inf, -torch.inf)
    for value, share, extra_rows in itertools.product(strange, (0.02, 1.0), (0, 3)):
        some = torch.rand(inputs.logits.shape) < share
        some &= torch.rand(len(some), 1) < 0.4
        logits = inputs.logits if value is None else torch.where(some, value, inputs.logits)
        given = inputs._replace(logits=torch.cat([logits, torch.randn(extra_rows, V)]))
        assert same(verify("rejection", kind, given, mode), verify("rejection", kind, given))


@pytest.mark.parametrize("kind", PROPOSALS)
@pytest.mark.parametrize(("rule", "name"), [("rejection", "no_filter"), ("rejection", "min_p"), ("block", "min_p")])
def test_the_ways_of_a_gpu_lead_to_the_same_tokens(rule, name, kind):
    lengths = [4, 3, 1, 0, -1, 4]
    inputs = ragged(kind, lengths, [0, 1, 2, 3, -1, 4])._replace(table=slot_table(FREE, V))
    mode = next(mode for mode in mode_table(V, "top_k") if mode.name == name)
    wanted = verify(rule, kind, inputs, mode)
    with for_a_gpu():
        assert same(verify(rule, kind, inputs, mode), wanted)
