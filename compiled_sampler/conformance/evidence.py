"""What answers are judged by: the law of a token, and tests with bounds on their false alarms and the bias they find.

Nothing of a sampler is imported here. The law is float64, for the semantics that a sampler declares. No p-value is an
approximation for many draws, so that rare cells need no pooling and 2e-9 means 2e-9.
"""

from __future__ import annotations

import bisect
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, bdtrc, betaincinv, lambertw

from compiled_sampler.conformance.adapter import Params, Semantics

Law = NDArray[np.float64]
Ids = NDArray[np.intp]

FALSE_ALARM = 1e-6  # bound on the probability that a run fails a sampler that is right
MAX_TESTS = 500  # bound on the p-values that a run judges
ALARM = FALSE_ALARM / MAX_TESTS  # a p-value below it fails a question
Z_99 = 2.5  # a little more than the normal deviation of 99 %, 2.33, since counts are whole numbers


def multinomial_p_value(counts: ArrayLike, law: ArrayLike) -> float:
    """A bound on the probability that draws of a law are as far from it in relative entropy; 0 for a token of none."""
    observed, wanted = np.asarray(counts, np.float64).ravel(), np.asarray(law, np.float64).ravel()
    if observed[wanted <= 0.0].any():
        return 0.0
    observed, wanted = observed[wanted > 0.0], wanted[wanted > 0.0] / wanted.sum()
    n, degrees, drawn = observed.sum(), len(wanted) - 1, observed > 0.0
    x = float((observed[drawn] * np.log(observed[drawn] / (n * wanted[drawn]))).sum())
    # P(n KL >= x) <= exp(-x) (e x / d)**d for x > d, with d + 1 cells: Agrawal, Finite-sample concentration of the
    # multinomial in relative entropy, arXiv 1904.02291. Tests of scipy are approximations where cells are rare.
    return math.exp(degrees - x + degrees * math.log(x / degrees)) if x > degrees > 0 else 1.0


def multinomial_power(n: int, cells: int, alarm: float = ALARM) -> float:
    """A total variation that ``multinomial_p_value`` finds with 99 %, whatever the law; 1 if none."""
    degrees = max(cells - 1, 1)
    # Solves x - d - d log(x / d) = -log(alarm) for x > d: the bound above, inverted.
    critical = -degrees * lambertw(-math.exp(-1.0 + math.log(alarm) / degrees), -1).real
    # n KL is at least 2 n TV**2 (Pinsker), with a deviation of about sqrt(2 n KL).
    needed = (Z_99 / math.sqrt(2.0) + math.sqrt(Z_99**2 / 2.0 + critical)) ** 2
    return min(1.0, math.sqrt(needed / (2.0 * n)))


def binomial_p_value(count: int, n: int, p: float) -> float:
    """Twice the probability of the smaller tail that holds this count, at most 1."""
    return min(1.0, 2.0 * float(min(bdtr(count, n, p), bdtrc(count - 1, n, p))))


def binomial_power(n: int, p: float, alarm: float = ALARM) -> tuple[float, float]:
    """The factors below and above 1 by which a probability must be wrong to be found with 99 %; -1 or inf if never."""
    counts = range(n + 1)
    low = bisect.bisect_left(counts, alarm / 2.0, key=lambda count: bdtr(count, n, p)) - 1
    high = bisect.bisect_right(counts, -alarm / 2.0, key=lambda count: -bdtrc(count - 1, n, p))
    below = betaincinv(low + 1, n - low, 0.01) / p if low >= 0 else -1.0
    above = betaincinv(high, n - high + 1, 0.99) / p if high <= n else math.inf
    return float(below), float(above)


def furthest_cell(counts: NDArray[np.int64], law: Law) -> int:
    """The cell whose count is furthest from what its probability says."""
    wanted = counts.sum() * law
    return int(np.abs((counts - wanted) / np.sqrt(np.maximum(wanted, 1e-9))).argmax())


def rare_power(rows: int) -> float:
    """The share of wrong rows of which one is among so many with 99 %."""
    return min(1.0, math.log(100.0) / max(rows, 1))


def variation(draws: int, cells: int) -> str:
    """The power of a test of all tokens, in words."""
    return f"total variation {multinomial_power(draws, cells):.2%}"


def bias(draws: int, cells: int) -> str:
    """The power of a test of a law, in words."""
    below, above = binomial_power(draws, 0.5)
    return f"{variation(draws, cells)}; of halves {0.5 * min(1.0, max(above - 1.0, 1.0 - below)):.2%}"


def leak(draws: int) -> str:
    """The power where one wrong draw is a failure, in words."""
    return f"a leak of {rare_power(draws):.0e}"


def one_in(compared: int, what: str) -> str:
    """The power of a comparison of bits, in words."""
    return f"one in {1.0 / rare_power(compared):.0f} {what}"


def law(logits: Law, params: Params, semantics: Semantics) -> Law:
    """The probability of every token of a row, float64 ``[V]``; all 0 where every token is masked."""
    # Ties that ``semantics`` leaves open are settled for the lowest id; beside +inf only the +inf tokens count.
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
    ids: Ids = np.argsort(-x, kind="stable")
    ids = ids[x[ids] > -np.inf]
    for name in semantics.filters:
        if name == "top_k" and 0 < params.top_k < len(ids):
            ties_are_kept = semantics.top_k_ties == "all"
            ids = ids[x[ids] >= x[ids[params.top_k - 1]]] if ties_are_kept else ids[: params.top_k]
        elif name == "top_p" and params.top_p < 1.0:
            cut = params.top_p * (mass if semantics.top_p_base == "row" else mass[ids]).sum()
            before = np.concatenate([[0.0], mass[ids].cumsum()[:-1]])
            kept = before <= cut if semantics.keeps_at_boundary else before < cut
            last = ids[max(1, int(kept.sum())) - 1]  # the first token is always kept
            ids = ids[mass[ids] >= mass[last]] if semantics.top_p_ties == "all" else ids[: max(1, int(kept.sum()))]
        elif name == "min_p" and params.min_p > 0.0:
            ids = ids[mass[ids] >= params.min_p]
    return ids
