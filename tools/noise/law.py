"""How far is the law of a race from the weights, given the errors of the noise's polynomials?

    python -m tools.noise.law

By quadrature over evenly spaced random bits through the production functions: the probability that a token wins against
one other, and against a sea of 2**17 equal ones, at many ratios of weights, against the exact ratio.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from compiled_sampler.core.noise import exponential, negative_log2

_POINTS = 1 << 20
_SEA_LOG2 = 17


def gumbel_quantiles() -> np.ndarray:
    """The noise at evenly spaced random bits, ascending: float64 ``[2**20]``."""
    step = 2**32 // _POINTS
    bits = torch.arange(-(2**31) + step // 2, 2**31, step).to(torch.int32)
    return np.sort(negative_log2(exponential(bits)).double().numpy())


def sea_quantiles() -> np.ndarray:
    """The best noise of ``2**17`` tokens, less 17, at evenly spaced quantiles: float64 ``[2**20]``."""
    u = (np.arange(_POINTS) + 0.5) / _POINTS
    smallest = -np.expm1(np.log1p(-u) / 2**_SEA_LOG2)  # quantiles of the smallest of 2**17 uniform numbers
    bits = np.floor(smallest * 2**32).astype(np.int64)
    return negative_log2(exponential(torch.from_numpy(bits).to(torch.int32))).double().numpy() - _SEA_LOG2


def worst_error(own: np.ndarray, other: np.ndarray, ratios_log2: np.ndarray) -> float:
    """Largest difference between P(own + ratio > other) and ``ratio / (1 + ratio)`` over the ratios."""
    levels = (np.arange(len(own)) + 0.5) / len(own)
    errors = []
    for ratio in ratios_log2:
        won = 1.0 - np.interp(other - ratio, own, levels, left=0.0, right=1.0).mean()
        errors.append(abs(won - 1.0 / (1.0 + 2.0**-ratio)))
    return max(errors)


def main() -> None:
    """Print the two errors."""
    own = gumbel_quantiles()
    ratios = np.concatenate([np.linspace(-8.0, 8.0, 65), np.linspace(-0.5, 0.5, 41) / math.pi])
    table = Table("race", "largest error of a probability")
    table.add_row("two tokens", f"{worst_error(own, own, ratios):.1e}")
    table.add_row("one against 2**17", f"{worst_error(own, sea_quantiles(), ratios):.1e}")
    Console().print(table)


if __name__ == "__main__":
    main()
