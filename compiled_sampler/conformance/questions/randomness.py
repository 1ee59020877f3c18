"""Are draws at different seeds and positions independent?"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from compiled_sampler.conformance.adapter import Params
from compiled_sampler.conformance.bench import MOST_ROWS, Bench
from compiled_sampler.conformance.evidence import ALARM, multinomial_p_value
from compiled_sampler.conformance.question import Finding, Question
from compiled_sampler.conformance.questions.law import variation
from compiled_sampler.conformance.rows import VOCAB, clear_row, oracle_law

Key = tuple[int, int]
"""A seed and a position."""

Pairs = Callable[[int, int], tuple[Key, Key]]
"""From a new seed and a count the keys of two draws that must be independent."""

LIVE = 6
"""Tokens of the rows that are not masked."""

SERIAL_ROWS = MOST_ROWS // 8
"""Of a stream whose neighbours are compared."""


def independent(bench: Bench, pairs: Pairs) -> Finding:
    """Whether two draws of a pair are independent, judged by the counts of both tokens together."""
    bench.needs(bench.semantics.seeds != "none", "seeds='none'")
    row = torch.full((VOCAB,), -torch.inf)
    row[5 : 5 + LIVE] = clear_row(bench, Params(), scale=0.5)[:LIVE]
    law = oracle_law(bench, row, Params())
    counts, first = np.zeros((VOCAB, VOCAB), np.int64), ((0, 0), (0, 0))
    for count in bench.portions(bench.effort.pairs, MOST_ROWS // 2, bench.effort.question_s):
        keys = [pairs(seed, n) for n, seed in enumerate(bench.new_seeds(count))]
        first = keys[0]
        tokens = [_drawn(bench, row, [pair[side] for pair in keys]) for side in (0, 1)]
        counts += np.bincount(tokens[0] * VOCAB + tokens[1], minlength=VOCAB**2).reshape(VOCAB, VOCAB)
    p_value = multinomial_p_value(counts, np.outer(law, law))
    equal, wanted = np.trace(counts) / counts.sum(), float((law**2).sum())
    num_pairs = int(counts.sum())
    detail = f"{num_pairs} pairs are equal in {equal:.2%}, independent ones in {wanted:.2%}"
    if p_value < ALARM:
        detail += f"; such as (seed, position) {first[0]} and {first[1]} (p < {p_value:.0e})"
    return Finding(p_value >= ALARM, detail, variation(num_pairs, LIVE**2), p_value, 1)


def _drawn(bench: Bench, row: torch.Tensor, keys: list[Key]) -> NDArray[np.int64]:
    """The tokens of one row at many keys, checked to be ids."""
    logits = row.to(bench.device).expand(len(keys), -1).contiguous()
    tokens = bench.sample(logits, [Params()] * len(keys), [seed for seed, _ in keys], [place for _, place in keys])
    return tokens.clamp(0, VOCAB - 1).numpy()


def serial(bench: Bench, params: Params) -> Finding:
    """Whether neighbours within a few long streams are independent, also under a filter that keeps few tokens."""
    bench.needs(bench.semantics.seeds != "none", "seeds='none'")
    row = clear_row(bench, params, scale=1.0)
    law, length = oracle_law(bench, row, params), SERIAL_ROWS
    streams = max(1, bench.effort.pairs // length)
    tables = np.zeros((3, VOCAB, VOCAB), np.int64)
    seeds = iter(bench.new_seeds(streams))
    for _ in bench.portions(streams, 1, bench.effort.question_s):
        seed = next(seeds)
        logits = row.to(bench.device).expand(length, -1).contiguous()
        drawn = bench.sample(logits, [params] * length, [seed] * length, range(length))
        tokens = drawn.clamp(0, VOCAB - 1).numpy()
        for table, lag in zip(tables, (1, 2, 3), strict=True):
            starts = np.flatnonzero(np.arange(length - lag) % (2 * lag) < lag)
            table += np.bincount(tokens[starts] * VOCAB + tokens[starts + lag], minlength=VOCAB**2).reshape(table.shape)
    p_values = [multinomial_p_value(table, np.outer(law, law)) for table in tables]
    least = min(p_values)
    equal = [f"{np.trace(table) / table.sum():.2%}" for table in tables]
    detail = f"{params}: tokens equal those 1, 2, 3 places before in {', '.join(equal)}, should in {(law**2).sum():.2%}"
    return Finding(least >= ALARM, detail, variation(int(tables[0].sum()), int((law > 0).sum()) ** 2), least, 3)


def under_a_filter(bench: Bench) -> Finding:
    """Serial independence where a filter keeps few tokens, and a sampler may try again."""
    params = Params(top_p=0.3)
    bench.needs(bool(bench.supported([params])), "unsupported top_p")
    return serial(bench, params)


def unseeded(bench: Bench) -> Finding:
    """Requests without a seed draw their own tokens, and other ones in the next call."""
    bench.needs(bench.semantics.unseeded, "unseeded=False")
    rows = 64
    draws = [bench.sample(torch.zeros(rows, VOCAB), [Params()] * rows, [None] * rows, [3] * rows) for _ in range(2)]
    distinct, changed = len(set(draws[0].tolist())), int((draws[0] != draws[1]).sum())
    detail = f"{distinct} tokens among {rows} unseeded rows of {VOCAB} equal logits; {changed} changed in the next call"
    is_kept = distinct > 8 and changed > 16  # by chance below 1e-31
    return Finding(is_kept, detail, "one noise for all requests, or for all calls")


KEYS: dict[str, tuple[str, Pairs]] = {
    "seed_1": ("neighbouring seeds", lambda seed, n: ((2 * seed, n), (2 * seed + 1, n))),
    "seed_2**32": ("seeds 2**32 apart", lambda seed, n: ((seed, n), (seed + 2**32, n))),
    "seed_2**63": ("seeds 2**63 apart", lambda seed, n: ((seed, n), (seed + 2**63, n))),
    "seed_negative": ("a seed and its negative", lambda seed, n: ((seed, n), (-seed, n))),
    "position_1": ("neighbouring positions", lambda seed, n: ((seed, n), (seed, n + 1))),
    "position_2**32": ("positions 2**32 apart", lambda seed, n: ((seed, n), (seed, n + 2**32))),
    "swapped": ("a seed and a position that are swapped", lambda seed, n: ((seed, n), (n, seed))),
    "sum": ("a seed and a position of one sum", lambda seed, n: ((seed, n + 1), (seed + 1, n))),
}

QUESTIONS = (
    *(
        Question(f"randomness.{name}", f"independent draws: {text}", functools.partial(independent, pairs=pairs))
        for name, (text, pairs) in KEYS.items()
    ),
    Question("randomness.serial", "independent draws: along a stream", functools.partial(serial, params=Params())),
    Question("randomness.serial_top_p", "independent draws: along a stream under a narrow top_p", under_a_filter),
    Question("randomness.unseeded", "requests without a seed differ", unseeded),
)
