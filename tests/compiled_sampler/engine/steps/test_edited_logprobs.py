"""Logprobs of requests with all edits, filters of whole rows and watermarks are those of float64, and cost no token."""

import math
import random
from collections import Counter

import pytest
import torch

from compiled_sampler import Logprobs, Sampler
from compiled_sampler.logprobs import LAWS, LogprobOutputs
from tests.builders.edits import (
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
from tests.builders.logprobs import close, filters_of, rows_of
from tests.oracles import oracle_edits
from tests.oracles import oracle_logprobs as oracle
from tests.tiers import tiers

ROWS, GIVEN = 16, (0, 31, 64, 90, 128)
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
    tiers([("eager", 32), ("reference", 1)], [("eager", 32), ("reference", 1), ("eager", 63)]),
)
def test_random_requests_have_the_logprobs_of_float64(backend, rounds):
    """Of up to 63 batches of 16: each law within 2e-6, and below -8 within 2.5e-7 of itself.

    Tokens and status are those of the slow truth, whatever is asked for.
    """
    source, sampler, seen = random.Random(23), edited_sampler(backend, ROWS), Counter[str]()
    plain = Sampler(V, ROWS, backend="eager")
    for _ in range(rounds):
        requests = [marked_request(source) for _ in range(ROWS)]
        slots = [each.added(sampler) for each in requests]
        plan, positions = sampler.plan(slots), torch.tensor([each.position for each in requests])
        logits, mask = hard_logits(source, ROWS), random_mask(source, ROWS, V) if source.random() < 0.4 else None
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
