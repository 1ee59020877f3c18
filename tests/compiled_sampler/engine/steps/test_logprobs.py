"""Logprobs of a sampler are the slow truth's on every path, and change no token."""

import itertools
import math
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from compiled_sampler import (
    Logprobs,
    Sampler,
    SamplingParams,
    replay,
)
from compiled_sampler.core.reference import kept, row_parameters
from compiled_sampler.logprobs import LAWS, LogprobOutputs
from compiled_sampler.modes import RULES
from tests.builders.edits import (
    BOUNDED_EDITS,
    FILTERS,
    Request,
    V,
    edited_rows,
    edited_sampler,
    hard_logits,
    plain_tokens,
    random_mask,
    random_request,
    unedited,
)
from tests.builders.inputs import sample_inputs
from tests.builders.logprobs import EVERYTHING, bare, close, filters_of, rows_of, wrong_fields
from tests.builders.sampler import REQUESTS, same
from tests.oracles import oracle_edits
from tests.oracles import oracle_logprobs as oracle
from tests.tiers import tiers

ROWS, K = 12, 3


def is_nothing(values: Tensor) -> bool:
    """Whether there is nothing: -inf in floats, -1 in integers."""
    return bool((values == (-torch.inf if values.is_floating_point() else -1)).all())


@pytest.mark.parametrize(("backend", "rounds"), tiers([("eager", 2)], [("eager", 2), ("eager", 6), ("reference", 2)]))
@pytest.mark.parametrize("wanted", EVERYTHING, ids=LAWS)
def test_sampled_tokens_have_the_logprobs_of_the_slow_truth(wanted, backend, rounds):
    """Of requests with every edit, with masks and without, on rows with ties, NaN and infinities."""
    source, sampler = random.Random(wanted.of), edited_sampler(backend, ROWS)
    for number in range(rounds):
        requests = [random_request(source, V, BOUNDED_EDITS if number else ()) for _ in range(ROWS)]
        slots = [each.added(sampler) for each in requests]
        plan = sampler.plan(slots)
        logits, positions = hard_logits(source, ROWS), torch.tensor([each.position for each in requests])
        mask = random_mask(source, ROWS, V) if number % 2 else None
        made = sampler.sample(plan, logits, positions, token_bitmask=mask, logprobs=wanted)
        assert same(bare(made), sampler.sample(plan, logits, positions, token_bitmask=mask))
        rows = list(zip(logits.tolist(), edited_rows(logits, requests, mask).tolist(), strict=True))
        for row, (request, token) in enumerate(zip(requests, made.token_ids.tolist(), strict=True)):
            found = rows_of(made.logprobs, row)
            assert wrong_fields(found, rows[row], unedited(request), wanted, token) == [], (row, request)
        for slot in slots:
            sampler.remove_request(slot)


def drafted(source: random.Random, requests, sampler: Sampler):
    """A plan with drafts of the requests, its rows, drafts, positions and masks, all drafts of few ids."""
    slots = [each.added(sampler) for each in requests]
    counts = [source.randrange(K + 1) for _ in requests]
    plan = sampler.plan([*slots, -1], num_drafts=[*counts, 1])
    rows = hard_logits(source, plan.num_rows)
    drafts = torch.full((len(counts) + 1, K), -1)
    for n, (first, count) in enumerate(zip(plan.first_rows, counts, strict=False)):
        likely = rows[first : first + count].nan_to_num(-1e9).argmax(-1)
        drafts[n, :count] = likely
    positions = torch.tensor([*(each.position for each in requests), 0])
    mask = random_mask(source, plan.num_rows, V) if source.random() < 0.5 else None
    return plan, rows, drafts, positions, mask


@pytest.mark.parametrize(("backend", "rounds"), tiers([("eager", 2)], [("eager", 2), ("eager", 5), ("reference", 1)]))
@pytest.mark.parametrize(("rule", "law"), tiers(zip(RULES, LAWS, strict=True), itertools.product(RULES, LAWS)))
def test_emitted_tokens_have_the_logprobs_of_the_slow_truth(rule, law, backend, rounds):
    """With ragged drafts, edits, masks, stops and padding; nothing behind a rejected draft or a stop token."""
    source, sampler, wanted = random.Random(rule + law), edited_sampler(backend, ROWS), EVERYTHING[LAWS.index(law)]
    seen = set()
    for number in range(rounds):
        requests = [random_request(source, V, BOUNDED_EDITS if number % 3 else ()) for _ in range(ROWS)]
        plan, rows, drafts, positions, mask = drafted(source, requests, sampler)
        made = sampler.verify(plan, rows, drafts, positions, rule, token_bitmask=mask, logprobs=wanted)
        assert same(bare(made), sampler.verify(plan, rows, drafts, positions, rule, token_bitmask=mask))
        assert all(is_nothing(each[-1]) for each in made.logprobs)
        for n, request in enumerate(requests):
            for place, token in enumerate(made.token_ids[n].tolist()):
                found = rows_of(made.logprobs, (n, place))
                if token < 0:
                    assert all(is_nothing(each) for each in found)
                    continue
                seen.add(place)
                row = plan.first_rows[n] + place
                text = request._replace(output=[*request.output, *made.token_ids[n, :place].tolist()])
                of_row = None if mask is None else mask[row : row + 1]
                edited = edited_rows(rows[row : row + 1], [text], of_row)[0].tolist()
                logits = rows[row].tolist(), edited
                assert wrong_fields(found, logits, unedited(request), wanted, token) == [], (n, place, request)
        for slot in plan.slots[:-1]:
            sampler.remove_request(slot)
    assert len(seen) > 1


def test_proposals_change_no_logprob_of_a_token():
    """Under each rule and form of proposals, rows that emit one token have one logprob."""
    sampler = Sampler(V, 4, backend="eager")
    slots = [sampler.add_request(SamplingParams(seed=n, top_k=30, min_p=0.01)) for n in range(4)]
    plan, rows, drafts = sampler.plan(slots, num_drafts=[2] * 4), torch.randn(12, V), torch.randint(V, (4, 2))
    every = Logprobs(of="filtered", token_ids=tuple(range(V)))
    single = sampler.sample(sampler.plan([slot for slot in slots for _ in range(3)]), rows, torch.arange(12))
    assert single.logprobs is None
    for rule in RULES:
        for form in ({}, {"draft_logits": torch.randn(8, V)}, {"draft_probs": torch.randn(8, V).softmax(-1)}):
            if rule == "match" and form:
                continue
            made = sampler.verify(plan, rows, drafts, torch.zeros(4, dtype=torch.int64), rule, logprobs=every, **form)
            given = made.logprobs.given.gather(2, made.token_ids.clamp(min=0)[..., None])[..., 0]
            assert torch.equal(torch.where(made.token_ids < 0, -torch.inf, given), made.logprobs.token)
            assert (made.logprobs.token[:, 0] > -torch.inf).all()


@pytest.mark.parametrize("drafts", [False, True])
def test_edited_logits_replay_what_was_drawn(drafts):
    """The kept set is that of the definition, and the logprobs are within 2e-6, also of the rows of drafts."""
    source, sampler = random.Random(5), edited_sampler("eager", ROWS)
    requests = [random_request(source, V, BOUNDED_EDITS) for _ in range(ROWS)]
    asked = Logprobs(of="filtered", num_kept=True, boundary=True)
    if drafts:
        plan, rows, tokens, positions, mask = drafted(source, requests, sampler)
        made = sampler.verify(plan, rows, tokens, positions, token_bitmask=mask, logprobs=asked)
        owners = [n for n, count in enumerate(plan.num_drafts) for _ in range(count + 1)]
        places = [place for count in plan.num_drafts for place in range(count + 1)]
    else:
        plan = sampler.plan([each.added(sampler) for each in requests])
        rows, positions, mask = hard_logits(source, ROWS), torch.tensor([r.position for r in requests]), None
        made = sampler.sample(plan, rows, positions, logprobs=asked)
        owners, places = list(range(ROWS)), None
    edited = sampler.edited_logits(plan, rows, positions, token_bitmask=mask)
    assert (edited.dtype, edited.shape) == (torch.float32, rows.shape)
    params = [unedited(requests[n]) if n < ROWS else SamplingParams(seed=0) for n in owners]
    index = (owners, places) if drafts else owners
    token_ids, found = made.token_ids[index], rows_of(made.logprobs, index)
    again, keep = replay(edited, params, token_ids, found.boundary)
    emitted = token_ids >= 0
    truth = kept(edited, row_parameters(sample_inputs(edited, params)), base_is_row=False)
    assert torch.equal(keep[emitted], truth[emitted])
    assert torch.equal(keep.sum(-1)[emitted], found.num_kept[emitted])
    assert emitted.sum() >= ROWS - 3
    for a, b in zip(again[emitted].tolist(), found.token[emitted].tolist(), strict=True):
        assert abs(a - b) <= oracle.error_bound(b)
    assert (again[~emitted] == -torch.inf).all()


@pytest.mark.parametrize("backend", tiers(["eager", "reference"], ["eager", "reference", "compiled"]))
def test_logits_without_edits_are_copied_as_they_are(backend):
    sampler = Sampler(V, 2, backend=backend, logits_dtype=torch.bfloat16)
    plan, logits = sampler.plan([sampler.add_request(REQUESTS["full"])] * 2), torch.randn(2, V + 3).bfloat16()
    made = sampler.edited_logits(plan, logits, torch.arange(2))
    assert torch.equal(made, logits[:, :V].float())
    plan = sampler.plan([], num_drafts=[])
    assert sampler.edited_logits(plan, logits[:0], torch.arange(0)).shape == (0, V)


# With filters of whole rows and watermarks.


MARKED_ROWS, GIVEN = 16, (0, 31, 64, 90, 128)
ASKED = [None, *(Logprobs(of=of, token_ids=GIVEN, num_kept=True) for of in LAWS)]


def marked_request(source: random.Random) -> Request:
    """A request whose parameters are each off or any; one of three has a watermark."""
    request = random_request(source, V)
    return request._replace(given={**request.given, "watermark_tokens": source.choice([0, 0, source.randrange(1, 9)])})


def noise_positions(requests: list[Request]) -> torch.Tensor:
    """What keys the noise of each row: its position, or a hash of the text before it."""
    of_rows = [(each.position, [*each.prompt, *each.output], each.given["watermark_tokens"]) for each in requests]
    return torch.tensor([oracle_edits.noise_position(*each) for each in of_rows])


def wrong_numbers(found: LogprobOutputs, law: dict[int, float], token: int, num_kept: int) -> list[str]:
    """What of a row is not the oracle's: logprobs of its token and of ``GIVEN``, and how many tokens are kept."""
    ids, logprobs = (token, *GIVEN), (float(found.token), *found.given.tolist())
    pairs = [(each, law.get(token_id, -math.inf)) for token_id, each in zip(ids, logprobs, strict=True)]
    apart = [f"{each} instead of {wanted}" for each, wanted in pairs if not close(each, wanted)]
    return apart if int(found.num_kept) == num_kept else [*apart, f"{found.num_kept} instead of {num_kept} kept"]


@pytest.mark.parametrize(
    ("backend", "rounds"),
    tiers([("eager", 32), ("reference", 1)], [("eager", 63)]),
)
def test_random_requests_have_the_logprobs_of_float64(backend, rounds):
    """Of up to 63 batches of 16: each law within 2e-6, and below -8 within 2.5e-7 of itself.

    Tokens and status are those of the slow truth, whatever is asked for.
    """
    source, sampler, seen = random.Random(23), edited_sampler(backend, MARKED_ROWS), Counter[str]()
    plain = Sampler(V, MARKED_ROWS, backend="eager")
    for _ in range(rounds):
        requests = [marked_request(source) for _ in range(MARKED_ROWS)]
        slots = [each.added(sampler) for each in requests]
        plan, positions = sampler.plan(slots), torch.tensor([each.position for each in requests])
        logits, mask = (
            hard_logits(source, MARKED_ROWS),
            random_mask(source, MARKED_ROWS, V) if source.random() < 0.4 else None,
        )
        edited = edited_rows(logits, requests, mask)
        tokens, status = plain_tokens(plain, requests, edited, noise_positions(requests))
        made = {each: sampler.sample(plan, logits, positions, token_bitmask=mask, logprobs=each) for each in ASKED}
        for asked, out in made.items():
            assert (out.token_ids.tolist(), out.status.tolist()) == (tokens, status), asked
        for row, (request, raw, x) in enumerate(zip(requests, logits.tolist(), edited.tolist(), strict=True)):
            filters = filters_of(unedited(request))
            num_kept = len(oracle.kept(x, filters)) or -1
            for asked in ASKED[1:]:
                law = oracle.law(asked.of, raw, x, filters)
                found = rows_of(made[asked].logprobs, row)
                assert wrong_numbers(found, law, tokens[row], num_kept) == [], (asked.of, request)
                seen.update(f"{asked.of} below -8" for each in GIVEN if law.get(each, 0.0) < -8.0)
                seen[asked.of] += tokens[row] >= 0
            seen.update(name for name in (*FILTERS, "watermark") if name in request.params.edits)
        for slot in slots:
            sampler.remove_request(slot)
    everything = {*LAWS, *(f"{of} below -8" for of in LAWS), *FILTERS, "watermark"}
    assert rounds == 1 or all(seen[name] > 30 for name in everything), seen
