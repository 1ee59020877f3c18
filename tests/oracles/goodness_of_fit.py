"""Statistical tests with a stated false-alarm rate.

Every test of a correct sampler calls ``accept`` on p-values; each call is wrong with probability ``FALSE_ALARM``. The
suite makes fewer than ``MAX_TESTS`` of them, and its seeds are fixed: the whole suite would have failed by chance, once
and for all, with probability below ``FALSE_ALARM * MAX_TESTS = 1e-3``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

FALSE_ALARM = 1e-6
"""Probability that one ``accept`` fails although the sampler is right."""

MAX_TESTS = 1000
"""Upper bound on the p-values that the suite judges."""

MIN_EXPECTED = 10.0
"""Cells that expect fewer draws are pooled: below it the chi-square law is no good approximation."""


class Fit(NamedTuple):
    """The outcome of a test of fit."""

    statistic: float
    degrees: int
    p_value: float


def pool(counts: ArrayLike, expected: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Counts and expectations with the rarest cells added together until each expects ``MIN_EXPECTED``."""
    observed, wanted = (np.asarray(values, dtype=np.float64).ravel() for values in (counts, expected))
    ranks = np.argsort(-wanted, kind="stable")
    observed, wanted = observed[ranks], wanted[ranks]
    large = int((wanted >= MIN_EXPECTED).sum())
    if large == len(wanted):
        return observed, wanted
    if wanted[large:].sum() < MIN_EXPECTED:
        large = max(large - 1, 0)
    return np.append(observed[:large], observed[large:].sum()), np.append(wanted[:large], wanted[large:].sum())


def chi_square(counts: ArrayLike, probabilities: ArrayLike) -> Fit:
    """Pearson's test of counts against exact probabilities.

    A draw of a token that has probability 0 gives the p-value 0.
    """
    observed = np.asarray(counts, dtype=np.float64).ravel()
    law = np.asarray([float(p) for p in np.asarray(probabilities).ravel()])
    if observed[law == 0.0].any():
        return Fit(np.inf, 0, 0.0)
    observed, wanted = pool(observed[law > 0.0], law[law > 0.0] * (observed.sum() / law.sum()))
    return _fit(observed, wanted, len(observed) - 1)


def independence(first: ArrayLike, second: ArrayLike, shape: tuple[int, int] | None = None) -> Fit:
    """Chi-square of the contingency table of two sequences of small non-negative integers.

    With a shape ``(a, b)`` both are uniform below a and b by construction; else the counts give the margins.
    """
    x, y = (np.asarray(values, dtype=np.int64).ravel() for values in (first, second))
    a, b = shape or (int(x.max()) + 1, int(y.max()) + 1)
    table = np.bincount(x * b + y, minlength=a * b).reshape(a, b).astype(np.float64)
    if shape is not None:
        return _fit(table, np.full(table.shape, len(x) / (a * b)), a * b - 1)
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    wanted = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / len(x)
    if wanted.min() < MIN_EXPECTED:
        raise ValueError(f"a cell expects {wanted.min():.1f} draws, fewer than {MIN_EXPECTED}; draw more")
    return _fit(table, wanted, (table.shape[0] - 1) * (table.shape[1] - 1))


def serial_independence(draws: ArrayLike, lag: int = 1) -> Fit:
    """Whether each draw is independent of the one ``lag`` places before it."""
    values = np.asarray(draws).ravel()
    return independence(values[:-lag], values[lag:])


def poisson_p_value(count: int, mean: float) -> float:
    """Two-sided p-value of a count of rare events."""
    return float(min(1.0, 2.0 * min(stats.poisson.cdf(count, mean), stats.poisson.sf(count - 1, mean))))


def accept(*fits: Fit | float) -> None:
    """Fail where a p-value is below ``FALSE_ALARM``."""
    values: Sequence[float] = [fit.p_value if isinstance(fit, Fit) else fit for fit in fits]
    for fit, p_value in zip(fits, values, strict=True):
        assert p_value >= FALSE_ALARM, f"p = {p_value:.3g}: {fit}"


def detects(fit: Fit | float) -> None:
    """Fail where a sampler known to be wrong is not found out."""
    p_value = fit.p_value if isinstance(fit, Fit) else fit
    assert p_value < FALSE_ALARM, f"p = {p_value:.3g}: {fit}, although the sampler is wrong"


def _fit(observed: NDArray[np.float64], wanted: NDArray[np.float64], degrees: int) -> Fit:
    if degrees < 1:
        return Fit(0.0, 0, 1.0)
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return Fit(statistic, degrees, float(stats.chi2.sf(statistic, degrees)))
