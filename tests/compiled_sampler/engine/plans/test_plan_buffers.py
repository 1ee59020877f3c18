"""Ragged drafts, padded or one row after the other, whose counts are planned or lie in buffers of an engine."""

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import Draft, Plan, Sampler, SamplingParams
from compiled_sampler.engine.requests.uploads import PlannedTensors
from compiled_sampler.modes import MOST_DRAFTS, RULES, mode_table
from tests.builders.sampler import emptied, normal_rows, same, sampler_with, verifying_sampler
from tests.tiers import tiers

V, K, N = 40, 3, 4
PARAMS = [SamplingParams(seed=n + 1, top_k=6 if n % 2 else 0, temperature=0.9 * (n != 2)) for n in range(N)]
DTYPES = torch.int64, torch.int32
COUNTS = [[1, 3, 0, 2], [3, 3, 3, 3], [0, 0, 0, 1], [0, 0, 0, 0], [3, 0, 3, -1]]


@pytest.fixture
def sampler() -> Sampler:
    return sampler_with(PARAMS, V, N)


@pytest.fixture(params=["eager", "reference", "graph"])
def on_each(request: pytest.FixtureRequest) -> Sampler:
    return verifying_sampler(request.param, V, PARAMS, K)


def logits_of(rows: int, seed: int = 0) -> Tensor:
    return normal_rows(rows, V, seed)


def handles(sampler: Sampler) -> list[Draft]:
    plan, positions = sampler.plan(range(N)), torch.arange(N)
    return [sampler.draft(plan, logits_of(N, j), positions + j, coupled=False, offset=j) for j in range(K)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_handles_belong_to_the_counts_on_the_device(sampler, rule, counts):
    live = [n for n in range(N) if counts[n] >= 0]
    full = sampler.plan(range(N), "full", [K] * N)
    slots, dtype = torch.tensor([n if n in live else -1 for n in range(N)]), DTYPES[len(live) % 2]
    full = dataclasses.replace(full, slot_ids=slots, draft_counts=torch.tensor(counts, dtype=dtype))
    logits, drafts, positions = logits_of(full.num_rows, 9), handles(sampler), torch.arange(N)
    found = sampler.verify(full, logits, drafts, positions, rule)
    assert full.planned.uploaded == ()  # nothing reads what was planned
    planned = sampler.plan([n if n in live else -1 for n in range(N)], "full", [max(count, 0) for count in counts])
    own = [drafts[j].logits[n] for n in live for j in range(counts[n])]
    given = None if rule == "match" or not own else torch.stack(own)
    tokens = torch.stack([draft.token_ids for draft in drafts], 1)
    rows = logits[: planned.num_rows]  # padding without rows stands last
    wanted = sampler.verify(planned, rows, tokens, positions, rule, draft_logits=given)
    assert same(found, wanted)


def test_the_test_above_tells_other_rows_of_the_proposals_apart(sampler):
    full = sampler.plan(range(N), "full", [K] * N)
    counts = torch.tensor(COUNTS[0])
    logits, drafts, positions = logits_of(full.num_rows, 9), handles(sampler), torch.arange(N)
    right = dataclasses.replace(full, draft_counts=counts)
    numbers = {"slots": full.ids.tobytes(), "num_drafts": counts.numpy().tobytes()}
    taken = PlannedTensors(numbers, counts.device, None)
    wrong = dataclasses.replace(full, planned=taken)  # the counts are taken for what was planned
    made = [sampler.verify(plan, logits, drafts, positions, "rejection") for plan in (right, wrong)]
    assert not torch.equal(made[0].token_ids, made[1].token_ids)


def call(sampler: Sampler, plan: Plan) -> None:
    if plan.num_drafts is None:
        sampler.sample(plan, torch.zeros(N, V), torch.arange(N))
    else:
        tokens = torch.zeros(N, K, dtype=torch.int64)
        sampler.verify(plan, torch.zeros(plan.num_rows, V), tokens, torch.arange(N))


# Drafts one row after the other, and sums of counts.


def drafts_of(sampler: Sampler, plan: Plan, logits: Tensor) -> Tensor:
    """Padded drafts ``[N, K]`` of which some are accepted, and some are no token ids."""
    made = torch.randint(-1, V + 1, (N, plan.width), generator=torch.Generator().manual_seed(1))
    for _ in range(2 if plan.width else 0):
        made[:, :2] = sampler.verify(plan, logits, made, torch.arange(N)).token_ids[:, : min(plan.width, 2)]
    return made


def flat_of(tokens: Tensor, counts: list[int]) -> Tensor:
    return torch.cat([row[: max(count, 0)] for row, count in zip(tokens, counts, strict=True)])


@pytest.mark.parametrize("counts", tiers([COUNTS[0], COUNTS[3]], COUNTS[:4]), ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_flat_drafts_are_verified_as_padded_ones(on_each, rule, counts):
    sampler = on_each
    plan, where = sampler.plan(range(N), "full", counts), torch.arange(N)
    logits = logits_of(plan.num_rows)
    tokens = drafts_of(sampler, plan, logits)
    flat, wanted = flat_of(tokens, counts), sampler.verify(plan, logits, tokens, where, rule)
    assert (wanted.num_accepted > 0).any() or rule != "match" or not plan.width
    strided = torch.full((3 * len(flat),), V - 1)[::3].copy_(flat)
    for given in (flat, strided, flat.int(), flat):
        before = given.clone()
        assert same(sampler.verify(plan, logits, given, where, rule), wanted)
        out = emptied(wanted)
        assert sampler.verify(plan, logits, given, where, rule, out=out) is out
        assert same(out, wanted)
        assert torch.equal(given, before)
    if rule != "match" and plan.width:
        probs = torch.softmax(logits_of(len(flat)), -1)
        found, own = (sampler.verify(plan, logits, each, where, rule, draft_probs=probs) for each in (flat, tokens))
        assert same(found, own)
    probs = torch.softmax(logits, -1)
    found, own = (sampler.verify_from_probs(plan, probs, each, where, rule=rule) for each in (flat, tokens))
    assert same(found, own)


RULES_AND_DTYPES = tiers([("match", torch.int32), ("block", torch.int64)], itertools.product(RULES, DTYPES))


@pytest.mark.parametrize(("rule", "dtype"), RULES_AND_DTYPES, ids=str)
def test_flat_drafts_of_counts_on_the_device(on_each, rule, dtype):
    sampler = on_each
    full, where = sampler.plan(range(N), "full", [K] * N), torch.arange(N)
    logits, buffer, slots = logits_of(full.num_rows), torch.zeros(N, dtype=dtype), torch.arange(N, dtype=dtype)
    tokens = drafts_of(sampler, full, logits)
    plan = dataclasses.replace(full, draft_counts=buffer, slot_ids=slots)
    for counts in (*COUNTS, [3, -1, 0, -1]):
        buffer.copy_(torch.tensor(counts))
        slots.copy_(torch.where(buffer < 0, -1, torch.arange(N)))
        own = flat_of(tokens, counts)
        for junk in (-1, V - 1, 2**40):
            flat = torch.full((N * K,), junk)
            flat[: len(own)] = own
            found, wanted = (sampler.verify(plan, logits, each, where, rule) for each in (flat, tokens))
            assert same(found, wanted)


def test_plans_of_one_shape_have_places_of_their_own(on_each):
    """A known call of the same sizes is no call of the same counts."""
    logits, where, flat = logits_of(N + 5), torch.arange(N), torch.arange(5)
    outs = []
    for counts in ([3, 1, 0, 1], [1, 3, 1, 0], [0, 1, 3, 1], [3, 1, 0, 1]):
        plan = on_each.plan(range(N), "full", counts)
        tokens = torch.full((N, K), -1)
        for row, its in zip(tokens, torch.split(flat, counts), strict=True):
            row[: len(its)] = its
        outs.append(on_each.verify(plan, logits, flat, where, "rejection"))
        assert same(outs[-1], on_each.verify(plan, logits, tokens, where, "rejection"))
    assert same(outs[0], outs[-1])
    assert not same(outs[0], outs[1])


@pytest.mark.parametrize(("rule", "dtype"), RULES_AND_DTYPES, ids=str)
def test_sums_of_counts_are_taken_as_the_counts(on_each, dtype, rule):
    sampler = on_each
    full, positions = sampler.plan(range(N), "full", [K] * N), torch.arange(N)
    counts, sums = torch.zeros(N, dtype=torch.int64), torch.zeros(N, dtype=dtype)
    plans = dataclasses.replace(full, draft_counts=counts), dataclasses.replace(full, cumulative_drafts=sums)
    logits, padded = logits_of(full.num_rows, 9), torch.randint(0, V, (N, K))
    flat, own = torch.randint(0, V, (N * K,)), handles(sampler)
    for each in [*COUNTS[:4], *COUNTS[:4]]:
        counts.copy_(torch.tensor(each))
        sums.copy_(counts.cumsum(0))
        before = sums.clone()
        for drafts in (padded, flat, flat.int(), *([own] if sampler.backend != "reference" else [])):
            found, wanted = (sampler.verify(plan, logits, drafts, positions, rule) for plan in plans[::-1])
            assert same(found, wanted)
        assert torch.equal(*(sampler.probs(plan, logits) for plan in plans))
        assert torch.equal(sums, before)


# What does not fit.


BUFFER, Wrong = torch.zeros(N, dtype=torch.int64), tuple[dict[str, Any], type[Exception], str]
INT16 = BUFFER.short(), TypeError, "must be torch.int64 or torch.int32, got torch.int16"
WRONG_BUFFERS = [INT16, (torch.zeros(8, dtype=torch.int64), ValueError, "must be [4], one a slot, got [8]; slice it")]
WRONG_BUFFERS += [(BUFFER.to("meta"), ValueError, "must be on cpu, got meta"), (None, TypeError, "got NoneType")]
TWO_FORMS = {"draft_counts": BUFFER, "cumulative_drafts": BUFFER}
OF_DRAFTS: list[Wrong] = [
    *(
        ({name: wrong}, error, words)
        for name in ("slot_ids", "draft_counts", "cumulative_drafts")
        for wrong, error, words in WRONG_BUFFERS
        if name != "cumulative_drafts" or wrong is not None  # None is as planned
    ),
    ({"slot_ids": [0, 1, N, 2]}, ValueError, "must be in [-1, 3], got 4 at 2; add_request() returns slots"),
    ({"draft_counts": [0, K + 1, 0, 0]}, ValueError, "must be in [-1, 3], got 4 at 1; pass as many columns"),
    ({"draft_counts": [2**62, 2**62, 0, 0]}, ValueError, f"must be in [-1, {MOST_DRAFTS}], got {2**62} at 0"),
    ({"draft_counts": [K, -1, 0, 0]}, ValueError, "must be >= 0 for requests, got -1 at 1; -1 is for slots of -1"),
    ({"draft_counts": [K, K - 1, 0, 0]}, ValueError, "must take 8 rows at most, got 9; plan"),
    ({"cumulative_drafts": [1, 0, 1, 1]}, ValueError, f"as differences, must be in [0, {MOST_DRAFTS}], got -1 at 1"),
    ({"cumulative_drafts": [K, K + 2, K + 2, K + 2]}, ValueError, "as differences, must take 8 rows at most, got 9"),
    (TWO_FORMS, ValueError, "must be as planned with cumulative_drafts, got a buffer; replac"),
]
OF_BOTH: list[Wrong] = [
    ({"slots": (0, 1, 2)}, ValueError, "must be "),
    ({"mode": mode_table(V, "top_k")[0]}, ValueError, "must be "),
    ({"num_drafts": (3, 3, 1, 2)}, ValueError, "must be "),
    ({"planned": None}, TypeError, "must be "),
    ({"origin": None}, TypeError, "must be "),
]
WITHOUT_DRAFTS: list[Wrong] = [
    ({"slot_ids": INT16[0]}, *INT16[1:]),
    ({"draft_counts": BUFFER}, ValueError, "must be None without drafts, got a buffer"),
    ({"cumulative_drafts": BUFFER}, ValueError, "must be None without drafts, got a buffer"),
]


@pytest.mark.parametrize(
    ("has_drafts", "changed", "error", "words"),
    [*((True, *each) for each in OF_DRAFTS + OF_BOTH), *((False, *each) for each in WITHOUT_DRAFTS + OF_BOTH)],
)
def test_a_replacement_that_does_not_fit_is_refused(sampler, has_drafts, changed, error, words):
    plan = sampler.plan(range(N), num_drafts=[K, 1, 0, 0] if has_drafts else None)  # 8 rows
    changed = {name: torch.tensor(each) if type(each) is list else each for name, each in changed.items()}
    with pytest.raises(error, match=rf"plan\.{next(iter(changed))},? ?.*{re.escape(words)}") as caught:
        call(sampler, dataclasses.replace(plan, **changed))
    assert ", got " in str(caught.value)
    call(sampler, plan)
    call(sampler, dataclasses.replace(plan, slot_ids=plan.slot_ids.clone()))


def test_sums_come_without_counts_or_with_those_that_were_planned(sampler):
    plan = dataclasses.replace(sampler.plan(range(N), num_drafts=[K] * N), cumulative_drafts=BUFFER)
    call(sampler, plan)
    call(sampler, dataclasses.replace(plan, draft_counts=plan.draft_counts))


@pytest.mark.parametrize("rule", RULES)
def test_counts_may_reach_the_columns_of_padded_drafts(sampler, rule):
    plan = dataclasses.replace(sampler.plan(range(3), num_drafts=[2, 2, 2]), draft_counts=torch.tensor([3, 2, 1]))
    given = logits_of(9, 5), logits_of(3, 6)[:, :3].argsort(), torch.arange(3), rule
    assert same(sampler.verify(plan, *given), sampler.verify(sampler.plan(range(3), num_drafts=[3, 2, 1]), *given))
