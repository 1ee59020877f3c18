"""Rows of logits and batches that questions are asked with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_sampler.conformance.adapter import Params
from compiled_sampler.conformance.bench import Bench, NotAsked
from compiled_sampler.conformance.evidence.oracle import Law, law

VOCAB = 32
"""Of the questions on laws."""

WIDE_VOCAB = 512
"""Of the comparisons of batches."""

MARGIN = 1e-4
"""Cuts of filters are at least so far from every token that float32 sums decide them alike."""

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


class Batch(NamedTuple):
    """The arguments of one call."""

    logits: Tensor
    """float32 ``[R, V]``."""
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
    """A random row, float32 ``[VOCAB]``, of different logits, no cut of a filter within MARGIN of a token.

    Args:
        bench: whose random numbers it takes.
        params: whose cuts are looked at.
        scale: of the logits.
        offset: added to them.
    """
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
    return all(((oracle_law(bench, row, each) > 0.0) == kept).all() for each in moved)


def hard_batch(bench: Bench, rows: int) -> Batch:
    """Rows of several kinds, parameters, seeds and positions: plain, peaked, flat, tied and masked.

    Args:
        bench: whose random numbers it takes.
        rows: R.
    """
    pool = bench.supported(HARD_PARAMS)
    x = bench.rng.standard_normal((rows, WIDE_VOCAB)) * bench.rng.choice([0.01, 1.0, 3.0, 8.0], (rows, 1))
    x[1::5] = x[1::5].round()
    x[2::7, :: 2 + rows % 3] = -np.inf
    positions = bench.rng.integers(0, 2**20, rows).tolist()
    first, last = bench.semantics.seed_range
    seeds = (bench.rng.integers(max(-(2**62), -(-first // 2)), min(2**62, last // 2 + 1), rows) * 2).tolist()
    params = [pool[n] for n in bench.rng.integers(0, len(pool), rows)]
    return Batch(torch.from_numpy(x).float(), params, seeds, positions)


def law_difference(counts: NDArray[np.int64], probabilities: Law) -> str:
    """The token whose count is furthest from what its probability says, in words."""
    n = counts.sum()
    wanted = n * probabilities
    worst = int(np.abs((counts - wanted) / np.sqrt(np.maximum(wanted, 1e-9))).argmax())
    return f"token {worst} came {counts[worst]} times in {n} draws, the law says {wanted[worst]:.1f}"
