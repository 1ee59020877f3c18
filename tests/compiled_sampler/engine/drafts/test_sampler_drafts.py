"""What an engine sees of speculation: streams as without it, drafts and their handles, laws, one call for all."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_sampler import Draft, Plan, Sampler, SamplingParams, Verification, VerifyOutputs
from compiled_sampler.batch import tensors_of
from compiled_sampler.modes import RULES
from tests.builders.sampler import (
    REQUESTS,
    SHARED_SLOTS,
    V,
    held,
    new_verified,
    nothing_compiles,
    same,
    sampler_with,
    shared_sampler,
    stages_stay_eager,
)
from tests.oracles import oracle
from tests.tiers import tiers

K, N = 4, len(REQUESTS)
PARAMS = list(REQUESTS.values())
LAWFUL = ("rejection", "block")
WAYS = [("match", ""), *((rule, kind) for rule in LAWFUL for kind in ("", "draft_probs", "draft_logits"))]


@pytest.fixture
def sampler() -> Sampler:
    return sampler_with(PARAMS)


class Batch(NamedTuple):
    """Arguments of ``verify``, and the tokens that the sampler draws one after the other without drafts."""

    plan: Plan
    logits: Tensor
    drafts: Tensor
    positions: Tensor
    plain: list[list[int]]


def rows_of(count: int, vocab_size: int = V, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3.0 * torch.randn(count, vocab_size)).to(dtype)


def batch_of(sampler: Sampler, slots: Sequence[int], widths: Sequence[int]) -> Batch:
    """Random rows and positions; a share of the drafts is right, the others are anything, also no token id."""
    plan, vocab_size = sampler.plan(slots, num_drafts=widths), sampler.vocab_size
    logits = rows_of(plan.num_rows, vocab_size, sampler.logits_dtype)
    positions = torch.randint(0, 2**40, (len(slots),))
    plain: list[list[int]] = [[] for _ in slots]
    starts = [sum(widths[:n]) + n for n in range(len(widths))]
    for step in range(max(widths) + 1):
        going = [n for n, width in enumerate(widths) if width >= step]
        rows = logits[[starts[n] + step for n in going]]
        drawn = sampler.sample(sampler.plan([slots[n] for n in going]), rows, positions[going] + step)
        for n, token in zip(going, drawn.token_ids.tolist(), strict=True):
            plain[n].append(token)
    drafts = torch.randint(-2, vocab_size + 2, (len(slots), max(widths)))
    for n, j in ((n, j) for n, width in enumerate(widths) for j in range(width) if torch.rand(1) < 0.7):
        drafts[n, j] = plain[n][j]
    return Batch(plan, logits, drafts, positions, plain)


def ragged(sampler: Sampler, count: int = 23) -> Batch:
    """Requests of all kinds, some in several entries, padding, and 0 to K drafts each."""
    slots = [2, -1, 2, *torch.randint(-1, 5, (count - 3,)).tolist()]
    return batch_of(sampler, slots, [K, K, 0, *torch.randint(0, K + 1, (count - 3,)).tolist()])


def proposals(kind: str, count: int, vocab_size: int = V) -> dict[str, Tensor]:
    logits = rows_of(count, vocab_size)
    return {"": {}, "draft_probs": {kind: torch.softmax(logits, -1)}, "draft_logits": {kind: logits}}[kind]


def block_of(sampler: Sampler, batch: Batch, logits: Tensor, coupled: bool) -> list[Draft]:
    """Handles of the drafts from logits ``[N, K, V]``."""
    return [sampler.draft(batch.plan, logits[:, j], batch.positions + j, coupled, j) for j in range(K)]


def assert_well_formed(out: VerifyOutputs, plan: Plan, drafts: Tensor) -> None:
    """Counts agree, drafts lie before the last token and -1 behind it, and padding is -1."""
    for n, (slot, width) in enumerate(zip(plan.slots, plan.num_drafts or (), strict=True)):
        emitted, accepted, matching = (int(each[n]) for each in out[1:4])
        if slot < 0:
            assert {emitted, accepted, matching, int(out.status[n]), *out.token_ids[n].tolist()} == {-1}
            continue
        assert 0 <= accepted == emitted - 1 <= width
        assert 0 <= matching <= width
        assert torch.equal(out.token_ids[n, :accepted], drafts[n, :accepted])
        assert 0 <= out.token_ids[n, accepted] < V
        assert (out.token_ids[n, emitted:] == -1).all()


@pytest.mark.parametrize("attempt", range(3))
def test_match_emits_what_the_plain_sampler_draws(sampler, attempt):
    torch.manual_seed(attempt)
    batch = ragged(sampler)
    out = sampler.verify(*batch[:4])
    assert_well_formed(out, batch.plan, batch.drafts)
    for n, (slot, tokens) in enumerate(zip(batch.plan.slots, batch.plain, strict=True)):
        hits = [t == d for t, d in zip(tokens[:-1], batch.drafts[n].tolist(), strict=False)]
        if slot >= 0:
            accepted = (*hits, False).index(False)
            assert out.token_ids[n, : accepted + 1].tolist() == tokens[: accepted + 1]
            assert (int(out.num_accepted[n]), int(out.num_matching[n])) == (accepted, sum(hits))


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_batch_gives_empty_results(sampler, rule):
    plan, none, rows = sampler.plan([], num_drafts=[]), torch.empty(0, dtype=torch.int64), torch.empty(0, V)
    for width in (0, 3):
        drafts, out = torch.empty(0, width, dtype=torch.int64), new_verified(0, width)
        assert same(sampler.verify(plan, rows, drafts, none, rule), out)
        assert same(sampler.verify_from_probs(plan, rows, drafts, none, rule=rule), out)
        assert sampler.verify(plan, rows, drafts, none, rule, out=out) is out
    assert [len(sampler.draft(plan, rows, none, coupled).token_ids) for coupled in (True, False)] == [0, 0]
    assert sampler.probs(sampler.plan([]), rows).shape == (0, V)


@pytest.mark.parametrize("has_drafts", [True, False], ids=["ragged", "no drafts"])
@pytest.mark.parametrize(("rule", "kind"), WAYS)
def test_out_and_wider_drafts_change_nothing_and_requests_without_drafts_get_the_plain_token(
    sampler, rule, kind, has_drafts
):
    batch = ragged(sampler) if has_drafts else batch_of(sampler, [0, 1, 2, 3, 4, -1], [0] * 6)
    given, (count, width) = proposals(kind, batch.plan.num_proposals), batch.drafts.shape
    wanted = sampler.verify(*batch[:4], rule, **given)
    assert_well_formed(wanted, batch.plan, batch.drafts)
    for n, (slot, drafts) in enumerate(zip(batch.plan.slots, batch.plan.num_drafts, strict=True)):
        if slot >= 0 and not drafts:
            fields = [wanted.token_ids[n, 0], *(each[n] for each in tensors_of(wanted)[1:])]
            assert fields == [batch.plain[n][0], 1, 0, 0, 0]
    for filler in (-1, 3, 10**12):
        wide, out = torch.cat([batch.drafts, torch.full((count, 3), filler)], 1), new_verified(count + 2, width + 5)
        columns = slice(1, width + 5)
        part = VerifyOutputs(out.token_ids[1:-1, columns], *(each[1:-1] for each in tensors_of(out)[1:]))
        assert sampler.verify(batch.plan, batch.logits, wide, batch.positions, rule, **given, out=part) is part
        assert same(part._replace(token_ids=part.token_ids[:, : width + 1]), wanted)
        assert (part.token_ids[:, width + 1 :] == -1).all()
        assert all((each[[0, -1]] == -7).all() for each in tensors_of(out))
        assert (out.token_ids[:, [0, -1]] == -7).all()
    if not has_drafts:
        assert same(sampler.verify(batch.plan, batch.logits, [], batch.positions, rule), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coupled_drafts_from_the_targets_own_logits_are_all_accepted(dtype):
    sampler = shared_sampler(V, dtype, "eager")
    with held(sampler, PARAMS) as slots:
        batch = batch_of(sampler, [*slots, -1, slots[1]], [K] * (N + 2))
        drafts = block_of(sampler, batch, batch.logits.view(-1, K + 1, V), coupled=True)
        out = sampler.verify(batch.plan, batch.logits, drafts, batch.positions)
    assert torch.stack([draft.token_ids for draft in drafts], 1).tolist() == [tokens[:K] for tokens in batch.plain]
    assert out.token_ids.tolist() == batch.plain
    assert out.num_accepted.tolist() == out.num_matching.tolist() == [K] * N + [-1, K]
    assert all(draft.logits is None for draft in drafts)


def test_independent_drafts_race_on_a_stream_of_their_own(sampler):
    rows, positions = rows_of(1).expand(60, V), torch.arange(60) + 10
    plan = sampler.plan([1] * 60)
    own = sampler.draft(plan, rows, positions, coupled=False).token_ids
    options = {"temperature": PARAMS[1].temperature, "seed": PARAMS[1].seed, "stream": oracle.DRAFT}
    assert own.tolist() == [oracle.draw(rows[0].tolist(), position=p, **options) for p in positions.tolist()]
    assert not torch.equal(own, sampler.sample(plan, rows, positions).token_ids)
    assert not torch.equal(own, sampler.draft(plan, rows, positions, coupled=False, offset=1).token_ids)
    greedy = sampler.draft(sampler.plan([0] * 60), rows, positions, coupled=False, offset=1).token_ids
    assert torch.equal(greedy, rows.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", LAWFUL)
def test_handles_stand_for_their_tokens_and_a_copy_of_their_logits(rule, dtype):
    sampler = shared_sampler(V, dtype, "eager")
    with held(sampler, PARAMS) as slots:
        widths = [3, 0, 1, K, 2, K, 1, 3]
        batch = batch_of(sampler, [slots[i] for i in (4, 0, 0, 1, 2, 3, 4, 3)], widths)
        firsts = [sum(widths[:n]) + n for n in range(8)]
        near = batch.logits[torch.tensor(firsts)[:, None] + torch.tensor(widths)[:, None].clamp(max=torch.arange(K))]
        buffer = (near + rows_of(8 * K, V, dtype).view(8, K, V) / 8).contiguous()
        rows = torch.cat([buffer[n, :width] for n, width in enumerate(widths)])
        handles = block_of(sampler, batch, buffer, coupled=False)
        buffer.fill_(torch.nan)
        out = sampler.verify(batch.plan, batch.logits, handles, batch.positions, rule)
        tokens = torch.stack([handle.token_ids for handle in handles], 1)
        given = (batch.plan, batch.logits, tokens, batch.positions, rule)
        assert same(out, sampler.verify(*given, draft_logits=rows))
        assert not same(out, sampler.verify(*given))
    assert_well_formed(out, batch.plan, tokens)


@pytest.mark.parametrize("with_law", [False, True])
@pytest.mark.parametrize("rule", LAWFUL)
def test_probabilities_of_the_target_verify_as_its_logits_do(sampler, rule, with_law):
    batch = ragged(sampler)
    q = torch.softmax(rows_of(batch.plan.num_proposals), -1) if with_law else None
    rows = batch.plan.slot_ids.repeat_interleave(batch.plan.draft_counts + 1).tolist()
    law = sampler.probs(sampler.plan(rows), batch.logits)
    out = sampler.verify_from_probs(batch.plan, law, batch.drafts, batch.positions, q, rule)
    assert_well_formed(out, batch.plan, batch.drafts)
    assert torch.equal(out.num_accepted, sampler.verify(*batch[:4], rule, draft_probs=q).num_accepted)
    for n, emitted in enumerate(out.num_emitted.tolist()):
        steps = torch.arange(max(emitted, 0))
        assert (law[sum(batch.plan.num_drafts[:n]) + n + steps, out.token_ids[n, steps]] > 0.0).all()
    part = new_verified(23, K)
    assert sampler.verify_from_probs(batch.plan, law, batch.drafts, batch.positions, q, rule, out=part) is part
    assert same(part, out)


@pytest.mark.parametrize("rule", RULES)
def test_a_greedy_request_draws_from_probabilities_by_its_seed_alone(sampler, rule):
    drawing = sampler.add_request(SamplingParams(temperature=3.0, top_k=2, seed=PARAMS[0].seed))
    law, none = torch.softmax(rows_of(1), -1).expand(80, V), torch.empty(80, 0, dtype=torch.int64)
    plans = [sampler.plan([slot] * 80, num_drafts=[0] * 80) for slot in (0, drawing, 1)]
    streams = [sampler.verify_from_probs(plan, law, none, torch.arange(80), rule=rule) for plan in plans]
    assert same(streams[0], streams[1])
    assert not same(streams[0], streams[2])
    assert len(set(streams[0].token_ids[:, 0].tolist())) > 5


def test_a_prepared_width_serves_narrower_drafts_with_the_same_tokens(sampler):
    known = (Verification("rejection", 3, "probabilities"), Verification("match", 6))
    prepared = sampler_with(PARAMS, verifications=known)
    for rule, kind in WAYS:
        for width in (0, 2, 3, 7):
            batch = batch_of(sampler, list(range(N)), [width] * N)
            given = proposals(kind, N * width)
            plan, out = prepared.plan(range(N), num_drafts=[width] * N), new_verified(N, width)
            assert prepared.verify(plan, *batch[1:4], rule, **given, out=out) is out
            assert same(out, sampler.verify(*batch[:4], rule, **given))
            assert same(out, prepared.verify(plan, *batch[1:4], rule, **given))


@pytest.mark.parametrize(
    ("backend", "rule"), tiers([("compiled", "match")], [("compiled", "match"), ("graph", "rejection")])
)
def test_backends_verify_the_same(backend, rule):
    known = [Verification("rejection", 3, "probabilities")]
    eager, other = (
        sampler_with(PARAMS[:2], V, SHARED_SLOTS, backend=each, verifications=known) for each in ("eager", backend)
    )
    batch = batch_of(eager, [0, 1, -1, 1, 1], [1, 3, 1, 0, 2])  # as wide as in the self-check
    given = proposals("" if rule == "match" else "draft_probs", 7)
    plan = other.plan(batch.plan.slots, "no_filter", batch.plan.num_drafts)
    assert same(other.verify(plan, *batch[1:4], rule, **given), eager.verify(*batch[:4], rule, **given))
    runs = {"verify[3] rejection, probabilities, no_filter rows=5 -> direct": 1} if backend == "graph" else {}
    assert other.statistics().coverage == runs


@pytest.mark.parametrize(("rule", "kind"), [WAYS[2], WAYS[6]])
def test_one_proposal_is_verified_by_compiled_stages_as_in_eager(sampler, rule, kind):
    """Inductor takes a size of 1 for a constant: a single proposal gets a second row."""
    compiled = sampler_with(PARAMS, backend="graph", verifications=[Verification(rule)])
    for counts in ([1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 1]):
        batch = batch_of(sampler, range(3), counts)
        given = proposals(kind, sum(counts))
        with stages_stay_eager():
            made = compiled.verify(compiled.plan(range(3), "full", counts), *batch[1:4], rule, **given)
        assert same(made, sampler.verify(*batch[:4], rule, **given))


def test_probabilities_are_prepared_whatever_modes_the_warm_up_names():
    params = [SamplingParams(seed=n + 1, top_k=7 if n % 2 else 0) for n in range(3)]
    sampler = sampler_with(params, V, SHARED_SLOTS, backend="compiled", verifications=[Verification("match")])
    with stages_stay_eager():
        sampler.warmup(modes=["greedy"])
    with nothing_compiles():
        probs, tokens = torch.rand(6, V).softmax(-1), torch.zeros(3, 1, dtype=torch.int64)
        sampler.verify_from_probs(sampler.plan(range(3), num_drafts=[1] * 3), probs, tokens, torch.arange(3))
