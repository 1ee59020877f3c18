"""Are draws at different seeds and positions independent?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from compiled_sampler.conformance.adapter import Params
from compiled_sampler.conformance.bench import MOST_ROWS, Bench, Effort
from compiled_sampler.conformance.evidence import ALARM, multinomial_p_value, variation
from compiled_sampler.conformance.question import Finding, question
from compiled_sampler.conformance.rows import VOCAB, clear_row, oracle_law

Key = tuple[int, int]  # a seed and a position

Pairs = Callable[[int, int], tuple[Key, Key]]
"""From a new seed and a count the keys of two draws that must be independent."""

PAIRS: dict[str, tuple[str, Pairs]] = {
    "seed_1": ("neighbouring seeds", lambda seed, n: ((2 * seed, n), (2 * seed + 1, n))),
    "seed_2**32": ("seeds 2**32 apart", lambda seed, n: ((seed, n), (seed + 2**32, n))),
    "seed_2**63": ("seeds 2**63 apart", lambda seed, n: ((seed, n), (seed + 2**63, n))),
    "seed_negative": ("a seed and its negative", lambda seed, n: ((seed, n), (-seed, n))),
    "position_1": ("neighbouring positions", lambda seed, n: ((seed, n), (seed, n + 1))),
    "position_2**32": ("positions 2**32 apart", lambda seed, n: ((seed, n), (seed, n + 2**32))),
    "swapped": ("a seed and a position that are swapped", lambda seed, n: ((seed, n), (n, seed))),
    "sum": ("a seed and a position of one sum", lambda seed, n: ((seed, n + 1), (seed + 1, n))),
}

LIVE = 6  # tokens of the rows of pairs that are not masked
SERIAL_ROWS = MOST_ROWS // 8  # of a stream whose neighbours are compared


def table(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each two tokens came together, ``[VOCAB, VOCAB]``."""
    return np.bincount(first * VOCAB + second, minlength=VOCAB**2).reshape(VOCAB, VOCAB)


def drawn(bench: Bench, row: torch.Tensor, params: Params, keys: Sequence[Key]) -> NDArray[np.int64]:
    """The tokens of one row at many keys, taken for ids."""
    logits = row.to(bench.device).expand(len(keys), -1).contiguous()
    seeds, places = [seed for seed, _ in keys], [place for _, place in keys]
    return bench.sample(logits, [params] * len(keys), seeds, places).clamp(0, VOCAB - 1).numpy()


def independent(bench: Bench, pairs: Pairs) -> Finding:
    """Whether two draws of a pair are independent, judged by the counts of both tokens together."""
    bench.needs(bench.semantics.seeds != "none", "seeds='none'")
    row = torch.full((VOCAB,), -torch.inf)
    row[5 : 5 + LIVE] = clear_row(bench, Params(), scale=0.5)[:LIVE]
    law = oracle_law(bench, row, Params())
    counts, example = np.zeros((VOCAB, VOCAB), np.int64), ((0, 0), (0, 0))
    for count in bench.portions(bench.effort.pairs, MOST_ROWS // 2, bench.effort.question_s):
        keys = [pairs(seed, n) for n, seed in enumerate(bench.new_seeds(count))]
        example = keys[0]
        counts += table(*(drawn(bench, row, Params(), [pair[side] for pair in keys]) for side in (0, 1)))
    p_value = multinomial_p_value(counts, np.outer(law, law))
    num_pairs, equal = int(counts.sum()), np.trace(counts) / counts.sum()
    detail = f"{num_pairs} pairs are equal in {equal:.2%}, independent ones in {(law**2).sum():.2%}"
    if p_value < ALARM:
        detail += f"; such as (seed, position) {example[0]} and {example[1]} (p < {p_value:.0e})"
    return Finding(p_value >= ALARM, detail, variation(num_pairs, LIVE**2), p_value, 1)


for name, (what, pairs) in PAIRS.items():
    ask = functools.partial(independent, pairs=pairs)
    question(f"randomness.{name}", f"independent draws: {what}", lambda effort: variation(effort.pairs, LIVE**2))(ask)


STREAMS = {
    "serial": ("along a stream", Params(), VOCAB),
    # Keeps few tokens, so that a sampler may try again.
    "serial_top_p": ("along a stream under a narrow top_p", Params(top_p=0.3), 6),
}
"""What is asked of long streams, the parameters of their rows, and how many tokens those keep."""


def independent_in_streams(bench: Bench, params: Params) -> Finding:
    """Whether neighbours within a few long streams are independent."""
    bench.needs(bool(bench.supported([params])), "unsupported top_p")
    bench.needs(bench.semantics.seeds != "none", "seeds='none'")
    row = clear_row(bench, params, scale=1.0)
    law, lags = oracle_law(bench, row, params), (1, 2, 3)
    tables = np.zeros((len(lags), VOCAB, VOCAB), np.int64)
    streams = max(1, bench.effort.pairs // SERIAL_ROWS)
    seeds = iter(bench.new_seeds(streams))
    for _ in bench.portions(streams, 1, bench.effort.question_s):
        seed = next(seeds)
        tokens = drawn(bench, row, params, [(seed, place) for place in range(SERIAL_ROWS)])
        for counts, lag in zip(tables, lags, strict=True):
            starts = np.flatnonzero(np.arange(SERIAL_ROWS - lag) % (2 * lag) < lag)  # no place is in two pairs
            counts += table(tokens[starts], tokens[starts + lag])
    least = min(multinomial_p_value(counts, np.outer(law, law)) for counts in tables)
    equal = ", ".join(f"{np.trace(counts) / counts.sum():.2%}" for counts in tables)
    detail = f"{params}: tokens equal those 1, 2, 3 places before in {equal}, should in {(law**2).sum():.2%}"
    return Finding(least >= ALARM, detail, variation(int(tables[0].sum()), int((law > 0).sum()) ** 2), least, len(lags))


def power_of_streams(effort: Effort, cells: int) -> str:
    return variation(max(1, effort.pairs // SERIAL_ROWS) * SERIAL_ROWS // 2, cells**2)


for name, (what, params, cells) in STREAMS.items():
    ask = functools.partial(independent_in_streams, params=params)
    power = functools.partial(power_of_streams, cells=cells)
    question(f"randomness.{name}", f"independent draws: {what}", power)(ask)


@question("randomness.unseeded", "requests without a seed differ", "one noise for all requests, or for all calls")
def unseeded(bench: Bench) -> Finding:
    bench.needs(bench.semantics.unseeded, "unseeded=False")
    rows = 64
    draws = [bench.sample(torch.zeros(rows, VOCAB), [Params()] * rows, [None] * rows, [3] * rows) for _ in range(2)]
    distinct, changed = len(set(draws[0].tolist())), int((draws[0] != draws[1]).sum())
    detail = f"{distinct} tokens among {rows} unseeded rows of {VOCAB} equal logits; {changed} changed in the next call"
    return Finding(distinct > 8 and changed > 16, detail)  # by chance below 1e-31
