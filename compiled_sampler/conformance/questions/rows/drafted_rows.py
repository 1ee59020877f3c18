"""Requests with drafts of every kind on hard rows, and what verifications of them must commit under match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Drafted, Params, Verified
from compiled_sampler.conformance.bench import Bench
from compiled_sampler.conformance.questions.rows.batches import Batch
from compiled_sampler.conformance.questions.rows.hard_rows import POSITIONS, hard_requests, hard_rows

WIDTH = 8
"""Drafts of a request, at most."""

REQUESTS = 256
"""Of a batch."""


class Work(NamedTuple):
    """Requests with drafts, and the rows that they are made of."""

    drafted: Drafted
    """With the drafts' laws."""
    rows: Batch
    """The rows of all places, request after request."""
    own: Tensor
    """int64 ``[R]``, what ``sample`` draws for the rows."""


def drafted_rows(
    bench: Bench,
    count: int,
    vocab_size: int,
    num_families: int,
    prepare: Callable[[Sequence[Params]], object] | None = None,
) -> Work:
    """Requests with 0 to 8 drafts from one of four drafters.

    The drafters are the sampler itself, random ids of which some are no token, the argmax, and the sampler on other
    logits, which shares the noise of the target.

    Args:
        bench: whose random numbers it takes.
        count: requests.
        vocab_size: V.
        num_families: of parameters, as for ``hard_requests``.
        prepare: called with the parameters before anything is drawn.
    """
    generator = torch.Generator().manual_seed(int(bench.rng.integers(2**62)))
    pool = hard_requests(bench, vocab_size, num_families)
    chosen = [pool[n] for n in bench.rng.integers(0, len(pool), count)]
    if prepare is not None:
        prepare([params for params, _ in chosen])
    last = bench.semantics.largest_position
    random = bench.rng.integers(0, last, count).tolist()
    starts = torch.tensor([*(each for each in POSITIONS if each <= last), *random][:count]).clamp(max=last - WIDTH)
    num_drafts = torch.randint(WIDTH + 1, (count,), generator=generator)
    request = torch.arange(count).repeat_interleave(num_drafts + 1)
    offset = torch.arange(len(request)) - (num_drafts + 1).cumsum(0)[request] + num_drafts[request] + 1
    # A row without a token ends a request where that is declared; elsewhere nothing says what comes behind it.
    may_be_empty = bench.semantics.all_masked == "minus_one"
    logits = hard_rows(bench, len(request), vocab_size, may_be_empty=may_be_empty)
    other = logits + 0.7 * torch.randn(logits.shape, generator=generator)
    of_row = [chosen[n] for n in request.tolist()]
    places = (starts[request] + offset).tolist()
    rows = Batch(logits, [params for params, _ in of_row], [seed for _, seed in of_row], places)
    own = bench.sample(*rows)
    drafters = torch.stack(
        [
            own,
            torch.randint(-2, vocab_size + 2, (len(request),), generator=generator),
            logits.nan_to_num(-torch.inf).argmax(-1),
            bench.sample(*rows._replace(logits=other)),
        ]
    )
    drafts, judged = torch.full((count, WIDTH), -1), offset < num_drafts[request]
    drafter = torch.randint(len(drafters), (count,), generator=generator)[request]
    drafts[request[judged], offset[judged]] = drafters[drafter, torch.arange(len(request))][judged]
    laws = torch.softmax(other.nan_to_num(0.0, 50.0, -50.0).clamp(-50.0, 50.0), -1)[judged]
    params, seeds = [params for params, _ in chosen], [seed for _, seed in chosen]
    return Work(Drafted(logits, params, seeds, starts, drafts, num_drafts.tolist(), laws), rows, own)


def strays(work: Work, verified: Verified) -> Tensor:
    """Which requests did not commit, under match, what the sampler draws row after row; bool ``[N]``.

    A request commits its own tokens up to the first that is not its draft. A token of -1, where a row has none, may be
    counted as emitted or not.
    """
    wrong, tokens_of_rows, start = [], work.own.tolist(), 0
    for n, count in enumerate(work.drafted.num_drafts):
        own, start = tokens_of_rows[start : start + count + 1], start + count + 1
        drafts, accepted = work.drafted.drafts[n].tolist(), 0
        while accepted < len(own) - 1 and own[accepted] == drafts[accepted] != -1:
            accepted += 1
        emitted, tokens = int(verified.num_emitted[n]), verified.token_ids[n].tolist()
        lengths = (accepted + 1, accepted) if own[accepted] < 0 else (accepted + 1,)
        fits = emitted in lengths and int(verified.num_accepted[n]) == accepted
        wrong.append(not fits or tokens[:emitted] != own[:emitted])
    return torch.tensor(wrong, dtype=torch.bool)


def committed(verified: Verified) -> Tensor:
    """Tokens ``[N, K+1]`` that are committed, -1 behind them, with both counts: int64 ``[N, K+3]``."""
    places = torch.arange(verified.token_ids.shape[1])
    tokens = torch.where(places < verified.num_emitted[:, None], verified.token_ids, -1)
    return torch.cat([tokens, verified.num_emitted[:, None], verified.num_accepted[:, None]], 1)
