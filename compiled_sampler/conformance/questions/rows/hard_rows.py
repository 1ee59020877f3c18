"""Requests and rows on which samplers differ if they can: every kind of parameter, ties, near ties, strange numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Params, Semantics
from compiled_sampler.conformance.bench import Bench, NotAsked
from compiled_sampler.conformance.questions.rows.batches import Batch

NUM_REQUESTS = 240
"""Parameters with a seed that the rows of a batch share."""

NUM_FAMILIES = 5
"""Kinds of requests, from greedy ones to wide filters; a batch takes the first few, so that every route is taken."""

SEEDS = (0, 1, -1, -(2**63), 2**63, 2**64 - 1)
POSITIONS = (0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1)

TEMPERATURES = (1e-5, 0.1, 0.7, 1.0, math.log2(math.e), 3.0, 1e30)
TOP_P = (1e-9, 0.1, 0.25, 0.5, 0.9, 0.999, 1.0 - 2.0**-53, 1.0)
MIN_P = (0.0, 0.0, 1e-12, 0.05, 0.5, 1.0)
NARROW = (1, 2, 5, 50, 64)


def _denormal(x: Tensor) -> Tensor:
    return (x.abs() * 1e5).to(torch.int32).view(torch.float32).copysign(x)


KINDS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("", lambda x: 4.0 * x),
    ("", lambda x: 3.0 * x * x * x),
    ("", lambda x: 0.01 * x),
    ("", lambda x: x.bfloat16().float()),
    ("", lambda x: (2.0 * x).round()),
    ("", lambda x: torch.zeros_like(x)),
    ("", lambda x: torch.zeros_like(x).copysign(x)),
    ("", _denormal),
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
    """The kinds of rows that a sampler does not declare to raise for.

    Args:
        semantics: what is declared.
        may_be_empty: whether rows may have no token.
    """
    barred = {name for name in ("nan", "infinity", "all_masked") if getattr(semantics, name) == "raises"}
    barred |= set() if may_be_empty else {"all_masked"}
    return [made for needs, made in KINDS if needs not in barred]


def hard_requests(bench: Bench, vocab_size: int, num_families: int) -> list[tuple[Params, int]]:
    """Parameters with a seed, of the first families that the target supports.

    Args:
        bench: whose random numbers it takes.
        vocab_size: V.
        num_families: of greedy, no filter, min_p, and narrow and wide top_k with top_p and min_p.
    """
    wide = (0, 65, vocab_size // 2, vocab_size - 1, vocab_size, vocab_size + 1)

    def one(family: int) -> Params:
        if family == 0:
            return Params(temperature=0.0)
        temperature = TEMPERATURES[bench.rng.integers(len(TEMPERATURES))]
        min_p = MIN_P[bench.rng.integers(len(MIN_P))] if family > 1 else 0.0
        if family < 3:
            return Params(temperature, min_p=min_p)
        top_k = (NARROW, wide)[family - 3]
        top_p = TOP_P[bench.rng.integers(len(TOP_P))]
        return Params(temperature, top_k[bench.rng.integers(len(top_k))], top_p, min_p)

    params = bench.supported([one(n % num_families) for n in range(NUM_REQUESTS)])
    if not params:
        raise NotAsked(f"declared: unsupported={sorted(bench.semantics.unsupported)}")
    first, last = bench.semantics.seed_range
    random = bench.rng.integers(max(first, -(2**63)), min(last, 2**63 - 1), len(params))
    seeds = [*(each for each in SEEDS if first <= each <= last), *random.tolist()]
    return list(zip(params, seeds, strict=False))


def mixed_batch(bench: Bench, rows: int, vocab_size: int, num_families: int) -> Batch:
    """Rows of every kind for requests of the first families, float32; one in sixteen is about to change its token.

    Args:
        bench: whose random numbers it takes, and whose sampler is asked where the token changes.
        rows: R.
        vocab_size: V.
        num_families: as for ``hard_requests``.
    """
    requests = hard_requests(bench, vocab_size, num_families)
    chosen = [requests[n] for n in bench.rng.integers(0, len(requests), rows)]
    last = bench.semantics.largest_position
    positions = [*(each for each in POSITIONS if each <= last), *bench.rng.integers(0, last, rows).tolist()][:rows]
    logits = hard_rows(bench, rows, vocab_size)
    batch = Batch(logits, [params for params, _ in chosen], [seed for _, seed in chosen], positions)
    near = batch.take(range(0, rows, 16))
    logits[::16] = at_the_edge(bench, near)
    return batch


def hard_rows(bench: Bench, rows: int, vocab_size: int, *, may_be_empty: bool = True) -> Tensor:
    """Rows of every kind in a random order, float32 ``[R, V]``."""
    generator = torch.Generator().manual_seed(int(bench.rng.integers(2**62)))
    made = kinds(bench.semantics, may_be_empty=may_be_empty)
    noise = torch.randn(rows, vocab_size, generator=generator)
    logits = torch.cat([kind(part) for kind, part in zip(made, noise.tensor_split(len(made)), strict=True)])
    return logits[torch.randperm(rows, generator=generator)]


def at_the_edge(bench: Bench, batch: Batch) -> Tensor:
    """The rows with one logit moved to where one ulp of it decides whether its token is drawn, float32 ``[R, V]``.

    The sampler under test is asked 32 times, by bisection, and half of the rows are left on either side. A row whose
    token that logit cannot change is left as the bisection leaves it.

    Args:
        bench: to draw with.
        batch: R rows of float32.
    """
    rows, vocab_size = batch.logits.shape
    tokens = torch.from_numpy(bench.rng.integers(0, vocab_size, rows))[:, None]
    largest = _key(torch.tensor([min(bench.semantics.largest_logit, 1e38)]))
    low, high = (-largest).repeat(rows), largest.repeat(rows)
    for _ in range(32):
        middle = (low + high) // 2
        moved = batch.logits.scatter(1, tokens, _float(middle)[:, None])
        wins = bench.sample(*batch._replace(logits=moved)) == tokens[:, 0]
        low, high = torch.where(wins, low, middle), torch.where(wins, middle, high)
    side = torch.where(torch.arange(rows) % 2 == 0, low, high)
    return batch.logits.scatter(1, tokens, _float(side)[:, None])


def _key(x: Tensor) -> Tensor:
    """Integers in the order of float32 numbers, int64; neighbours are one ulp apart, and ``-x`` has minus the key."""
    bits = x.view(torch.int32).long()
    return torch.where(bits < 0, -(bits + 2**31), bits)


def _float(key: Tensor) -> Tensor:
    """The float32 numbers of keys."""
    return key.abs().to(torch.int32).view(torch.float32) * torch.where(key < 0, -1.0, 1.0)
