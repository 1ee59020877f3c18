"""The golden cases: what is drawn in every mode, by every rule, for both bases of top-p; results are integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams, Verification
from compiled_sampler.batch import tensors_of

P = SamplingParams
REQUESTS: dict[str, tuple[SamplingParams, ...]] = {
    "greedy": (P(temperature=0.0, seed=1), P(top_k=1, seed=2)),
    "no_filter": (P(seed=3), P(temperature=0.7, seed=-4), P(temperature=1e-5, seed=2**63)),
    "min_p": (P(min_p=0.05, seed=5), P(min_p=1.0, temperature=1.3, seed=6), P(min_p=0.002, temperature=2.0, seed=7)),
    "top_k_top_p": (
        P(top_k=50, top_p=0.9, seed=8),
        P(top_k=64, min_p=0.02, seed=9),
        P(top_k=3, top_p=0.5, seed=10),
    ),
    "top_k": (P(top_k=100, seed=11), P(top_k=65, temperature=2.0, seed=12), P(top_k=128, min_p=0.01, seed=13)),
    "full": (
        P(top_p=0.9, seed=14),
        P(top_p=0.99, min_p=1e-3, seed=15),
        P(top_k=110, top_p=0.8, seed=16),
        P(top_k=100, top_p=0.6, temperature=1.5, seed=17),
        P(temperature=1e30, top_p=0.75, seed=2**64 - 1),
    ),
}
"""Requests by the mode that is forced for them."""

LAYOUTS = (
    (129, "top_k", torch.float32),
    (129, "all", torch.float32),
    (1000, "top_k", torch.float32),
    (1000, "all", torch.float32),
    (1000, "top_k", torch.bfloat16),
)
"""V, the base of top-p and the dtype of logits: one sampler each."""

ROWS, COUNTS, WIDTH = 24, (3, 0, 2, 1, 3, 3), 3
"""Rows that are sampled, and the drafts of each request that are verified."""

WAYS = (
    ("match", "one_hot"),
    *((rule, kind) for rule in ("rejection", "block") for kind in ("one_hot", "probabilities", "logits")),
)
"""How drafts are verified: the rule, and what the drafts were drawn from."""

QUICK_LAYOUT = LAYOUTS[0]
QUICK = ("greedy, sample", "min_p, sample", "full, sample", "full, match one_hot")
"""What backends that compile draw of this layout; compiling all cases would take many minutes."""

Result = list[list[int]]
Drawn = TypeVar("Drawn")


class Case(NamedTuple):
    """One call of a sampler."""

    name: str
    is_quick: bool  # whether backends that compile draw it, too
    draw: Callable[[], Result]


def cases_of(layout: tuple[int, str, torch.dtype], backend: str, device: str) -> Iterator[Case]:
    """All golden cases of a layout, always in one order."""
    vocab_size, base, dtype = layout
    ways, buckets = [Verification("match", WIDTH)], (len(COUNTS), ROWS)
    sampler = Sampler(vocab_size, 32, device, dtype, backend, base, buckets=buckets, verifications=ways)
    if backend == "graph":
        sampler.warmup(modes=["full"])
    slots = {mode: [sampler.add_request(params) for params in requests] for mode, requests in REQUESTS.items()}
    prefix = f"V={vocab_size} {base} {str(dtype).removeprefix('torch.')}"
    for mode in REQUESTS:
        for way, draw in (*_sampled(sampler, mode, slots[mode]), *_verified(sampler, mode, slots[mode])):
            quick = layout == QUICK_LAYOUT and f"{mode}, {way}" in QUICK
            yield Case(f"{prefix} {mode}, {way}", quick, partial(by_compiled_stages, sampler, draw))
    if layout in (LAYOUTS[0], LAYOUTS[2]):
        for way, draw in _verified_probabilities(sampler, slots["full"]):
            yield Case(f"{prefix} probabilities, {way}", False, partial(by_compiled_stages, sampler, draw))


def by_compiled_stages(sampler: Sampler, call: Callable[[], Drawn]) -> Drawn:
    """What a call returns once its stages are compiled, if the backend has any: a first one runs in eager torch."""
    drawn, lowering = call(), sampler.statistics().lowering
    if lowering is not None and (lowering.queued_stages or lowering.eager_stages):
        sampler.warmup(modes=())
        drawn = call()
    return drawn


def _sampled(sampler: Sampler, mode: str, slots: Sequence[int]) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Tokens of rows of every kind, of a single row, of a drafter, and checksums of probabilities."""
    logits = hard_logits(ROWS, sampler.vocab_size, 1).to(sampler.device, sampler.logits_dtype)
    chosen = [slots[row * 5 // 3 % len(slots)] for row in range(ROWS)]
    chosen[17] = -1
    positions = (torch.arange(ROWS) * 1000003 + 2**33).to(sampler.device)
    plan, single = sampler.plan(chosen, mode), sampler.plan(chosen[1:2], mode)
    yield "sample", lambda: _integers(sampler.sample(plan, logits, positions))
    yield "sample one row", lambda: _integers(sampler.sample(single, logits[1:2], positions[1:2]))
    yield "draft", lambda: _integers(sampler.draft(plan, logits, positions, coupled=False, offset=2).drawn)
    yield "probs", lambda: [_checksums(sampler.probs(plan, logits))]


def _verified(sampler: Sampler, mode: str, slots: Sequence[int]) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Outcomes of every rule for every kind of proposal."""
    rows, vocab_size = sum(COUNTS) + len(COUNTS), sampler.vocab_size
    dtype, device = sampler.logits_dtype, sampler.device
    logits = hard_logits(rows, vocab_size, 2).roll(3, 0).to(dtype)
    drafts = drafted_tokens(COUNTS, first_tokens(logits), vocab_size, 3)
    proposed = _first_drafts(drafts)
    draft_probs = weighted(sum(COUNTS), vocab_size, 4, proposed).to(device)
    draft_logits = hard_logits(sum(COUNTS), vocab_size, 5).roll(5, 0).to(device, dtype)
    plan = sampler.plan([slots[n % len(slots)] for n in range(len(COUNTS))], mode, COUNTS)
    logits, drafts, positions = logits.to(device), drafts.to(device), (torch.arange(len(COUNTS)) * 7 + 2**40).to(device)

    def verified(rule: str, kind: str) -> Result:
        probs, values = (draft_probs if kind == "probabilities" else None), (draft_logits if kind == "logits" else None)
        return _integers(sampler.verify(plan, logits, drafts, positions, rule, draft_probs=probs, draft_logits=values))

    for rule, kind in WAYS:
        yield f"{rule} {kind}", partial(verified, rule, kind)


def _verified_probabilities(sampler: Sampler, slots: Sequence[int]) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Outcomes of every rule where rows hold the target's probabilities."""
    rows, vocab_size, device = sum(COUNTS) + len(COUNTS), sampler.vocab_size, sampler.device
    firsts = first_tokens(hard_logits(rows, vocab_size, 6))
    target, drafts = weighted(rows, vocab_size, 7, firsts), drafted_tokens(COUNTS, firsts, vocab_size, 8)
    target[4, 0] = float("nan")
    proposed = weighted(sum(COUNTS), vocab_size, 9, _first_drafts(drafts)).to(device)
    plan = sampler.plan([slots[n % len(slots)] for n in range(len(COUNTS))], "full", COUNTS)
    target, drafts, positions = target.to(device), drafts.to(device), (torch.arange(len(COUNTS)) * 7).to(device)

    def verified(rule: str, kind: str) -> Result:
        draft_probs = proposed if kind == "probabilities" else None
        return _integers(sampler.verify_from_probs(plan, target, drafts, positions, draft_probs, rule))

    for rule, kind in WAYS:
        if kind != "logits":
            yield f"{rule} {kind}", partial(verified, rule, kind)


def _first_drafts(drafts: Tensor) -> Tensor:
    """The draft of each row of the proposals, int64 ``[D]``; 0 where it is no token."""
    drafted = [max(int(drafts[n, j]), 0) for n, count in enumerate(COUNTS) for j in range(count)]
    return torch.tensor(drafted[:-WIDTH] + [0] * WIDTH)


def _integers(results: tuple[Any, ...]) -> Result:
    """Every field as a flat list."""
    return [field.flatten().tolist() for field in tensors_of(results)]


def _checksums(probabilities: Tensor) -> list[int]:
    """A number for each row ``[R, V]`` that depends on all bits of its probabilities and on their places."""
    bits = probabilities.cpu().view(torch.int32).to(torch.int64)
    return (bits * torch.arange(1, bits.shape[1] + 1)).sum(-1).tolist()


_WORD = 0xFFFFFFFF
_DENORMAL = 2.0**-149


def hashed(count: int, seed: int) -> Tensor:
    """Words in ``[0, 2**32)``, int64 ``[count]``: the 32-bit permutation ``lowbias32`` of 0, 1, ... and a seed."""
    h = (torch.arange(count) * 0x9E3779B1 + seed * 0x85EBCA6B) & _WORD
    for shift, factor in ((16, 0x7FEB352D), (15, 0x2C1B3C6D)):
        h = ((h ^ (h >> shift)) * factor) & _WORD
    return h ^ (h >> 16)


def bells(rows: int, columns: int, seed: int) -> Tensor:
    """Nearly normal numbers of deviation 1.15, multiples of 1/128: float32 ``[rows, columns]``."""
    words = hashed(rows * columns, seed).view(rows, columns)
    total = (words & 255) + ((words >> 8) & 255) + ((words >> 16) & 255) + (words >> 24)
    return (total - 510).to(torch.float32) * 2.0**-7


def hard_logits(rows: int, vocab_size: int, seed: int) -> Tensor:
    """Rows ``[R, V]`` of 16 kinds in turn: plain, peaked, flat, tied, masked, strange and empty ones."""
    x, words = bells(rows, vocab_size, seed), hashed(rows * vocab_size, seed + 1).view(rows, vocab_size)
    some, few, sign = words % 3 == 0, words % 50 == 0, torch.where(words & 64 > 0, 1.0, -1.0)
    kinds = (
        2.0 * x,
        8.0 * x,
        x * 2.0**-7,
        (2.0 * x).round(),
        4.0 * x,
        torch.where(some, -math.inf, 2.0 * x),
        torch.where(few, math.nan, 4.0 * x),
        torch.where(few, math.inf, x),
        0.0 * sign,
        (words & 0xFFF).to(torch.float32) * _DENORMAL * sign,
        torch.where(some, 1.5, 1.5 + 2.0**-23),
        x * 2.0**120,
        torch.full_like(x, -math.inf),
        torch.where(some, math.nan, -math.inf),
        torch.where(few, -3.0 * 2.0**100, -math.inf),
        torch.where(some, 2.0 * x, 4.0 * x - 8.0),
    )
    kind = torch.arange(rows) % len(kinds)
    return torch.stack(kinds)[kind, torch.arange(rows)]


def weighted(rows: int, vocab_size: int, seed: int, favourites: Tensor) -> Tensor:
    """Probabilities up to a factor: float32 ``[rows, V]`` in ``[0, 1]``, peaked at ``favourites``, int64 ``[rows]``."""
    words = hashed(rows * vocab_size, seed).view(rows, vocab_size)
    # A third of the tokens has none, and every seventh row has none at all.
    p = torch.where(words % 3 == 0, 0, words >> 16).to(torch.float32) * (2.0**-17 / vocab_size)
    p[torch.arange(rows), favourites] = (1.0 + (words[:, 0] & 3).to(torch.float32)) * 2.0**-3
    p[6::7] = 0.0
    return p


def first_tokens(logits: Tensor) -> Tensor:
    """The first token of each row's order, int64 ``[R]``; 0 where every token is masked."""
    x = torch.where(logits > -math.inf, logits, -math.inf).to(torch.float64)
    ids = torch.arange(x.shape[1])
    return torch.where(x == x.amax(-1, keepdim=True), ids, x.shape[1]).amin(-1) % x.shape[1]


def drafted_tokens(counts: tuple[int, ...], firsts: Tensor, vocab_size: int, seed: int) -> Tensor:
    """Drafts ``[N, K]``: likely ones at most places, some of any token, one out of range; -1 beyond the counts."""
    words = hashed(len(counts) * max(counts), seed).tolist()
    drafts, row = torch.full((len(counts), max(counts)), -1), 0
    for n, count in enumerate(counts):
        for j in range(count):
            word = words[n * max(counts) + j]
            drafts[n, j] = int(firsts[row + j]) if word % 4 else word // 4 % vocab_size
        row += count + 1
    drafts[-1, 0] = vocab_size
    return drafts
