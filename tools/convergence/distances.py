"""How far counts are from a law, and how far those of perfect draws would be: total variation.

The distance of n perfect draws moves by at most 1/n when one draw changes. So by McDiarmid's inequality it exceeds its
expectation by more than ``sqrt(ln(1 / a) / (2 n))`` with probability below ``a``, whatever the law.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

FALSE_ALARM = 1e-6
"""Probability that perfect draws are farther from their law than ``limit``."""


def total_variation(counts: NDArray[np.int64], law: NDArray[np.float64]) -> float:
    """Half of the summed differences between shares and probabilities: 0 for equal laws, 1 for disjoint ones."""
    return float(np.abs(counts / counts.sum() - law).sum() / 2)


def expected(draws: int, law: NDArray[np.float64]) -> float:
    """The mean distance of that many perfect draws.

    The count of a cell is binomial, whose mean absolute deviation is ``2 m C(n, m) p^m q^(n - m + 1)`` for the least
    integer ``m`` above ``n p`` (de Moivre; Diaconis and Zabell, Statistical Science 6, 1991).
    """
    p = law[(law > 0.0) & (law < 1.0)]
    m = np.floor(draws * p) + 1.0
    choose = gammaln(draws + 1.0) - gammaln(m + 1.0) - gammaln(draws - m + 1.0)
    deviations = 2.0 * m * np.exp(choose + m * np.log(p) + (draws - m + 1.0) * np.log1p(-p))
    return float(deviations.sum() / (2 * draws))


def limit(draws: int, law: NDArray[np.float64]) -> float:
    """The distance that perfect draws exceed with probability below ``FALSE_ALARM``."""
    return expected(draws, law) + math.sqrt(math.log(1.0 / FALSE_ALARM) / (2 * draws))
