"""What answers are judged by: the law of a token, and tests with bounds on their false alarms and the bias they find.

Nothing of a sampler is imported here. The law is float64, one token at a time, for the semantics that a sampler
declares. No p-value is an approximation for many draws, so that rare cells need no pooling and 2e-9 means 2e-9.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compiled_sampler.conformance.adapter import Params, Semantics

Law = NDArray[np.float64]
Ids = NDArray[np.intp]

FALSE_ALARM = 1e-6
"""Bound on the probability that a run fails a sampler that is right."""

MAX_TESTS = 500
"""Bound on the p-values that a run judges."""

ALARM = FALSE_ALARM / MAX_TESTS
"""A p-value below it fails a question."""

Z_99 = 2.5
"""A little more than the normal deviation of 99 %, 2.33, since counts are whole numbers."""


def multinomial_p_value(counts: ArrayLike, law: ArrayLike) -> float:
    """A bound on the probability that draws of a law are as far from it in relative entropy; 0 for a token of none.

    ``P(n KL >= x) <= exp(-x) (e x / d)**d`` for x > d, with d + 1 cells: Agrawal, Finite-sample concentration of the
    multinomial in relative entropy, arXiv 1904.02291.
    """
    observed, wanted = np.asarray(counts, np.float64).ravel(), np.asarray(law, np.float64).ravel()
    if observed[wanted <= 0.0].any():
        return 0.0
    observed, wanted = observed[wanted > 0.0], wanted[wanted > 0.0] / wanted.sum()
    n, degrees, drawn = observed.sum(), len(wanted) - 1, observed > 0.0
    x = float((observed[drawn] * np.log(observed[drawn] / (n * wanted[drawn]))).sum())
    return math.exp(min(0.0, -_exponent(x, degrees))) if degrees else 1.0


def _exponent(x: float, degrees: int) -> float:
    """Minus the logarithm of the bound; 0 up to x = d, where it says nothing."""
    return x - degrees - degrees * math.log(x / degrees) if x > degrees else 0.0


def multinomial_power(n: int, cells: int, alarm: float = ALARM) -> float:
    """A total variation that ``multinomial_p_value`` finds with 99 %, whatever the law; 1 if none.

    ``n KL`` is at least ``2 n TV**2`` (Pinsker), with a deviation of about ``sqrt(2 n KL)``.
    """
    degrees = max(cells - 1, 1)
    critical = _root(lambda x: _exponent(x, degrees) + math.log(alarm), degrees, 1e9)
    needed = (Z_99 / math.sqrt(2.0) + math.sqrt(Z_99**2 / 2.0 + critical)) ** 2
    return min(1.0, math.sqrt(needed / (2.0 * n)))


def binomial_p_value(count: int, n: int, p: float) -> float:
    """A bound on the probability that one of two tails reaches this count (Chernoff)."""
    return min(1.0, 2.0 * math.exp(-n * _relative_entropy(count / n, p)))


def binomial_power(n: int, p: float, alarm: float = ALARM) -> tuple[float, float]:
    """The factors below and above 1 by which a probability must be wrong to be found with 99 %; 0 below: not missed.

    A factor below of -1 says that not even a probability of 0 would be found.
    """
    wanted = math.log(2.0 / alarm) / n
    deviation = Z_99 / math.sqrt(n * p)
    top = _root(lambda f: _relative_entropy(f * p, p) - wanted, 1.0, 1.0 / p)
    above = (deviation / 2.0 + math.sqrt(deviation**2 / 4.0 + top)) ** 2
    if _relative_entropy(0.0, p) <= wanted:
        return -1.0, above
    low = _root(lambda f: wanted - _relative_entropy(f * p, p), 0.0, 1.0)
    below = (-deviation / 2.0 + math.sqrt(deviation**2 / 4.0 + low)) ** 2
    return below, above


def rare_power(rows: int) -> float:
    """The share of wrong rows of which one is among so many with 99 %."""
    return min(1.0, math.log(100.0) / max(rows, 1))


def _relative_entropy(q: float, p: float) -> float:
    parts = ((q, p), (1.0 - q, 1.0 - p))
    return sum(a * math.log(a / b) if b > 0.0 else math.inf for a, b in parts if a > 0.0)


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function is 0, by bisection."""
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if rising(middle) > 0.0 else (middle, high)
    return high


def law(logits: NDArray[np.float64], params: Params, semantics: Semantics) -> Law:
    """The probability of every token of a row, float64 ``[V]``; all 0 where every token is masked.

    NaN counts as -inf, and beside +inf only the +inf tokens count. Ties that ``semantics`` leaves open are settled for
    the lowest id.
    """
    x = np.where(np.isnan(logits), -np.inf, logits)
    top = x.max()
    if top == -np.inf:
        return np.zeros(len(x))
    x = np.where(x == top, 0.0, -np.inf) if top == np.inf else x - top
    if params.temperature == 0.0:
        return np.where(np.arange(len(x)) == x.argmax(), 1.0, 0.0)
    mass = np.exp(x / params.temperature)
    kept = kept_ids(x, mass, params, semantics)
    probabilities = np.zeros(len(x))
    probabilities[kept] = mass[kept] / mass[kept].sum()
    return probabilities


def kept_ids(x: Law, mass: Law, params: Params, semantics: Semantics) -> Ids:
    """Ids that pass every filter, likeliest first, ties by id; ``x`` is 0 and ``mass`` 1 at the likeliest."""
    ids = np.argsort(-x, kind="stable")
    ids = ids[x[ids] > -np.inf]
    for name in semantics.filters:
        if name == "top_k" and params.top_k:
            ids = _top_k(x, ids, params.top_k, semantics)
        elif name == "top_p" and params.top_p < 1.0:
            ids = _top_p(mass, ids, params.top_p, semantics)
        elif name == "min_p" and params.min_p > 0.0:
            ids = ids[mass[ids] >= params.min_p]
    return ids


def _top_k(x: Law, ids: Ids, k: int, semantics: Semantics) -> Ids:
    if semantics.top_k_ties == "all" and k < len(ids):
        tied: Ids = ids[x[ids] >= x[ids[k - 1]]]
        return tied
    return ids[:k]


def _top_p(mass: Law, ids: Ids, top_p: float, semantics: Semantics) -> Ids:
    base = mass.sum() if semantics.top_p_base == "row" else mass[ids].sum()
    before = np.concatenate([[0.0], mass[ids].cumsum()[:-1]])
    kept = before <= top_p * base if semantics.keeps_at_boundary else before < top_p * base
    kept[0] = True
    passing: Ids = ids[kept]
    return ids[mass[ids] >= mass[passing[-1]]] if semantics.top_p_ties == "all" else passing
