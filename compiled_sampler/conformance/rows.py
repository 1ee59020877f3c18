"""Rows of logits that questions are asked with: clear ones, batches, hard ones, and requests with drafts.

Hard rows are those on which samplers differ if they can: every kind of parameter, ties, near ties, strange numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Drafted, Params, Semantics, Verified
from compiled_sampler.conformance.bench import Bench, NotAsked
from compiled_sampler.conformance.evidence import Law, law

VOCAB = 32  # of the questions on laws
WIDE_VOCAB = 512  # of the comparisons of batches
MARGIN = 1e-4  # cuts of filters are at least so far from every token that float32 sums decide them alike

HARD_PARAMS = (
    Params(),
    Params(temperature=0.0),
    Params(temperature=0.7, top_k=50, top_p=0.9),
    Params(top_p=0.9),
    Params(temperature=1.5, min_p=0.05),
    Params(top_k=100),
    Params(top_k=20, top_p=0.8, min_p=0.02),
    Params(temperature=0.5, top_p=0.99),
)

NUM_REQUESTS = 240  # parameters with a seed that the rows of a batch share

NUM_FAMILIES = 5  # kinds of requests, of which a batch takes the first few, so that every route is taken

SEEDS = (0, 1, -1, -(2**63), 2**63, 2**64 - 1)
POSITIONS = (0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1)

TEMPERATURES = (1e-5, 0.1, 0.7, 1.0, math.log2(math.e), 3.0, 1e30)
TOP_P = (1e-9, 0.1, 0.25, 0.5, 0.9, 0.999, 1.0 - 2.0**-53, 1.0)
MIN_P = (0.0, 0.0, 1e-12, 0.05, 0.5, 1.0)

WIDTH = 8  # drafts of a request among hard rows, at most
REQUESTS = 256  # of a batch


class Batch(NamedTuple):
    """The arguments of one call."""

    logits: Tensor  # float32 [R, V]
    params: list[Params]
    seeds: list[int]
    positions: list[int]

    def take(self, rows: Sequence[int]) -> Batch:
        """Some rows in some order."""
        params, seeds = [self.params[r] for r in rows], [self.seeds[r] for r in rows]
        return Batch(self.logits[list(rows)], params, seeds, [self.positions[r] for r in rows])

    def plus(self, other: Batch) -> Batch:
        """These rows, then those of another batch."""
        return Batch(
            torch.cat([self.logits, other.logits]),
            self.params + other.params,
            self.seeds + other.seeds,
            self.positions + other.positions,
        )

    def describe(self, row: int) -> str:
        """What repeats one row, besides its logits, which the repeated question makes again."""
        return f"row {row}: {self.params[row]}, seed {self.seeds[row]}, position {self.positions[row]}"


def oracle_law(bench: Bench, row: Tensor, params: Params) -> Law:
    """The law of a row ``[V]`` of any dtype, float64 ``[V]``."""
    return law(row.to("cpu", torch.float64).numpy(), params, bench.semantics)


def clear_row(bench: Bench, params: Params, scale: float = 2.0, offset: float = 0.0) -> Tensor:
    """A random row, float32 ``[VOCAB]``, of different logits, no cut of a filter within MARGIN of a token."""
    for _ in range(1000):
        row = torch.from_numpy(bench.rng.standard_normal(VOCAB) * scale + offset).float()
        if is_clear(bench, row, params) and len(set(row.tolist())) == VOCAB:
            return row
    raise NotAsked(f"no random row has clear cuts for {params}")


def is_clear(bench: Bench, row: Tensor, params: Params) -> bool:
    """Whether the kept set stays when every cut moves by MARGIN of itself."""
    kept = oracle_law(bench, row, params) > 0.0
    moved = [
        replace(params, top_p=min(1.0, params.top_p + by) if params.top_p < 1.0 else 1.0, min_p=params.min_p * (1 + by))
        for by in (-MARGIN, MARGIN)
    ]
    return all(((oracle_law(bench, row, other) > 0.0) == kept).all() for other in moved)


def hard_batch(bench: Bench, rows: int) -> Batch:
    """Rows of several kinds, parameters, seeds and positions: plain, peaked, flat, tied and masked."""
    pool = bench.supported(HARD_PARAMS)
    x = bench.rng.standard_normal((rows, WIDE_VOCAB)) * bench.rng.choice([0.01, 1.0, 3.0, 8.0], (rows, 1))
    x[1::5] = x[1::5].round()
    x[2::7, :: 2 + rows % 3] = -np.inf
    positions = bench.rng.integers(0, 2**20, rows).tolist()
    first, last = bench.semantics.seed_range
    seeds = (bench.rng.integers(max(-(2**62), -(-first // 2)), min(2**62, last // 2 + 1), rows) * 2).tolist()
    params = [pool[n] for n in bench.rng.integers(0, len(pool), rows)]
    return Batch(torch.from_numpy(x).float(), params, seeds, positions)


KINDS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("", lambda x: 4.0 * x),
    ("", lambda x: 3.0 * x * x * x),
    ("", lambda x: 0.01 * x),
    ("", lambda x: x.bfloat16().float()),
    ("", lambda x: (2.0 * x).round()),
    ("", lambda x: torch.zeros_like(x)),
    ("", lambda x: torch.zeros_like(x).copysign(x)),
    ("", lambda x: (x.abs() * 1e5).to(torch.int32).view(torch.float32).copysign(x)),  # denormals
    ("infinity", lambda x: 1e38 * x),
    ("all_masked", lambda x: torch.where(x > 1.5, x, -math.inf)),
    ("all_masked", lambda x: torch.full_like(x, -math.inf)),
    ("nan", lambda x: torch.where(x.abs() > 2.0, torch.full_like(x, math.nan).copysign(x), 4.0 * x)),
    ("infinity", lambda x: torch.where(x.abs() > 2.5, x * math.inf, x)),
    ("infinity", lambda x: torch.where(x == x.amax(-1, keepdim=True), math.inf, x)),
    ("all_masked", lambda x: torch.where(x > 1.5, -3e38, -math.inf)),
)
"""Rows ``[R, V]`` made of a standard normal sample, with the declared choice that must not be "raises" for them."""


def kinds(semantics: Semantics, *, may_be_empty: bool = True) -> list[Callable[[Tensor], Tensor]]:
    """The kinds of rows that a sampler does not declare to raise for."""
    barred = {name for name in ("nan", "infinity", "all_masked") if getattr(semantics, name) == "raises"}
    barred |= set() if may_be_empty else {"all_masked"}
    return [kind for needs, kind in KINDS if needs not in barred]


def families(vocab_size: int) -> tuple[dict[str, tuple[Any, ...]], ...]:
    """What the parameters of each of NUM_FAMILIES kinds of requests are picked from."""
    narrow, wide = (1, 2, 5, 50, 64), (0, 65, vocab_size // 2, vocab_size - 1, vocab_size, vocab_size + 1)
    with_min_p = {"temperature": TEMPERATURES, "min_p": MIN_P}
    return (
        {"temperature": (0.0,)},
        {"temperature": TEMPERATURES},
        with_min_p,
        with_min_p | {"top_p": TOP_P, "top_k": narrow},
        with_min_p | {"top_p": TOP_P, "top_k": wide},
    )


def hard_requests(bench: Bench, count: int, vocab_size: int, num_families: int) -> tuple[list[Params], list[int]]:
    """Parameters and seeds of rows that share NUM_REQUESTS requests, of the first families that are supported."""
    choices = families(vocab_size)[:num_families]
    requests = (choices[n % num_families].items() for n in range(NUM_REQUESTS))
    picked = [Params(**{name: values[bench.rng.integers(len(values))] for name, values in each}) for each in requests]
    params = bench.supported(picked)
    bench.needs(bool(params), f"unsupported={sorted(bench.semantics.unsupported)}")
    first, last = bench.semantics.seed_range
    random = bench.rng.integers(max(first, -(2**63)), min(last, 2**63 - 1), len(params))
    seeds = [*(seed for seed in SEEDS if first <= seed <= last), *random.tolist()]
    chosen = bench.rng.integers(0, len(params), count).tolist()
    return [params[n] for n in chosen], [seeds[n] for n in chosen]


def mixed_batch(bench: Bench, rows: int, vocab_size: int, num_families: int) -> Batch:
    """Rows of every kind for requests of the first families, float32; one in sixteen is about to change its token."""
    params, seeds = hard_requests(bench, rows, vocab_size, num_families)
    positions = hard_positions(bench, rows)
    batch = Batch(hard_rows(bench, rows, vocab_size), params, seeds, positions)
    batch.logits[::16] = at_the_edge(bench, batch.take(range(0, rows, 16)))
    return batch


def hard_positions(bench: Bench, count: int) -> list[int]:
    """Positions up to the largest one that is declared, those at the edges of words first."""
    last = bench.semantics.largest_position
    return [*(place for place in POSITIONS if place <= last), *bench.rng.integers(0, last, count).tolist()][:count]


def hard_rows(bench: Bench, rows: int, vocab_size: int, *, may_be_empty: bool = True) -> Tensor:
    """Rows of every kind in a random order, float32 ``[R, V]``."""
    generator = torch.Generator().manual_seed(int(bench.rng.integers(2**62)))
    row_kinds = kinds(bench.semantics, may_be_empty=may_be_empty)
    noise = torch.randn(rows, vocab_size, generator=generator)
    logits = torch.cat([kind(part) for kind, part in zip(row_kinds, noise.tensor_split(len(row_kinds)), strict=True)])
    return logits[torch.randperm(rows, generator=generator)]


def at_the_edge(bench: Bench, batch: Batch) -> Tensor:
    """The rows with one logit moved to where one ulp of it decides whether its token is drawn, float32 ``[R, V]``."""
    rows, vocab_size = batch.logits.shape
    tokens = torch.from_numpy(bench.rng.integers(0, vocab_size, rows))[:, None]
    largest = torch.tensor(min(bench.semantics.largest_logit, 1e38)).view(torch.int32).item()
    low, high = torch.full((rows,), -largest), torch.full((rows,), largest)
    for _ in range(32):  # bisection; a row whose token that logit cannot change is left as it ends
        middle = (low + high) // 2
        moved = batch.logits.scatter(1, tokens, _float(middle)[:, None])
        wins = bench.sample(*batch._replace(logits=moved)) == tokens[:, 0]
        low, high = torch.where(wins, low, middle), torch.where(wins, middle, high)
    side = torch.where(torch.arange(rows) % 2 == 0, low, high)
    return batch.logits.scatter(1, tokens, _float(side)[:, None])


def _float(key: Tensor) -> Tensor:
    """The float32 numbers of integers in their order, where neighbours are one ulp apart and 0 is 0."""
    return key.abs().to(torch.int32).view(torch.float32) * torch.where(key < 0, -1.0, 1.0)


def drafted_rows(bench: Bench, count: int, vocab_size: int, num_families: int) -> tuple[Drafted, Tensor]:
    """Requests with 0 to 8 drafts of one of four drafters, and what ``sample`` draws for their rows, int64 ``[R]``."""
    generator = torch.Generator().manual_seed(int(bench.rng.integers(2**62)))
    params, seeds = hard_requests(bench, count, vocab_size, num_families)
    starts = torch.tensor(hard_positions(bench, count)).clamp(max=bench.semantics.largest_position - WIDTH)
    num_drafts = torch.randint(WIDTH + 1, (count,), generator=generator)
    request = torch.arange(count).repeat_interleave(num_drafts + 1)
    offset = torch.arange(len(request)) - (num_drafts + 1).cumsum(0)[request] + num_drafts[request] + 1
    # A row without a token ends a request where that is declared; elsewhere nothing says what comes behind it.
    may_be_empty = bench.semantics.all_masked == "minus_one"
    logits = hard_rows(bench, len(request), vocab_size, may_be_empty=may_be_empty)
    other = logits + 0.7 * torch.randn(logits.shape, generator=generator)
    places = (starts[request] + offset).tolist()
    rows = Batch(logits, [params[n] for n in request.tolist()], [seeds[n] for n in request.tolist()], places)
    own = bench.sample(*rows)
    random_ids = torch.randint(-2, vocab_size + 2, (len(request),), generator=generator)
    likeliest, of_other = logits.nan_to_num(-torch.inf).argmax(-1), bench.sample(*rows._replace(logits=other))
    # The sampler itself, ids of which some are no token, the argmax, the sampler on other logits and the same noise.
    drafters = torch.stack([own, random_ids, likeliest, of_other])
    drafts, judged = torch.full((count, WIDTH), -1), offset < num_drafts[request]
    drafter = torch.randint(len(drafters), (count,), generator=generator)[request]
    drafts[request[judged], offset[judged]] = drafters[drafter, torch.arange(len(request))][judged]
    laws = torch.softmax(other.nan_to_num(0.0, 50.0, -50.0).clamp(-50.0, 50.0), -1)[judged]
    return Drafted(logits, params, seeds, starts, drafts, num_drafts.tolist(), laws), own


def matched(own: Sequence[int], drafts: Sequence[int], parents: Sequence[int]) -> list[int]:
    """What a request commits under match: its rows' own tokens from the root on, to the first that no child drafts."""
    tokens, node = [own[0]], -1
    for child, parent in enumerate(parents):  # behind its parent; of siblings with one id the first counts
        if parent == node and drafts[child] == tokens[-1] >= 0:
            node = child
            tokens.append(own[child + 1])
    return tokens


def strays(drafted: Drafted, own: Tensor, verified: Verified, parents: Tensor | None = None) -> Tensor:
    """Which requests did not commit, under match, what the sampler draws row after row; bool ``[N]``."""
    wrong, own_tokens, start = [], own.tolist(), 0
    for n, count in enumerate(drafted.num_drafts):
        tree = range(-1, count - 1) if parents is None else parents[n].tolist()
        wanted = matched(own_tokens[start : start + count + 1], drafted.drafts[n].tolist(), tree)
        start += count + 1
        emitted = int(verified.num_emitted[n])
        # A token of -1, where a row has none, may be counted as emitted or not.
        fits = emitted == len(wanted) or (emitted == len(wanted) - 1 and wanted[-1] < 0)
        fits &= int(verified.num_accepted[n]) == len(wanted) - 1
        wrong.append(not fits or verified.token_ids[n, :emitted].tolist() != wanted[:emitted])
    return torch.tensor(wrong, dtype=torch.bool)


def first_row(batch: Batch, tokens: Tensor, wanted: Tensor, is_wrong: Tensor) -> str:
    """The first row whose token, or else status, is wrong, in words; "" if none is."""
    if not is_wrong.any():
        return ""
    row = int(is_wrong.nonzero()[0])
    token, other = int(tokens[row]), int(wanted[row])
    found = f"token {token}, not {other}" if token != other else f"another status of token {token}"
    return f"{found}; V = {batch.logits.shape[1]}, {batch.logits.dtype}, {batch.describe(row)}"


def first_request(drafted: Drafted, verified: Verified, is_wrong: Tensor) -> str:
    """What was committed of the first request that is wrong, and what repeats it besides its logits; "" if none is."""
    if not is_wrong.any():
        return ""
    n = int(is_wrong.nonzero()[0])
    tokens, num_emitted, num_accepted = (field[n].tolist() for field in verified)
    where = f"request {n}: {drafted.params[n]}, seed {drafted.seeds[n]}, position {int(drafted.positions[n])}"
    drafts = drafted.drafts[n, : drafted.num_drafts[n]].tolist()
    return f"tokens {tokens}, {num_emitted} emitted, {num_accepted} accepted; {where}, drafts {drafts}"


def committed(verified: Verified) -> Tensor:
    """Tokens ``[N, K+1]`` that are committed, -1 behind them, with both counts: int64 ``[N, K+3]``."""
    places = torch.arange(verified.token_ids.shape[1])
    tokens = torch.where(places < verified.num_emitted[:, None], verified.token_ids, -1)
    return torch.cat([tokens, verified.num_emitted[:, None], verified.num_accepted[:, None]], 1)
