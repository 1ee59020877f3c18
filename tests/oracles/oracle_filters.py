"""The slow truth of filters that look at whole rows: one row at a time, in fractions of the numbers that it holds.

Nothing of the package is imported here. A dropped token becomes -inf; everything else stays as it is.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from tests.oracles import oracle

XTC = 4
"""The stream of the coin."""


def filtered(logits: Sequence[float], params: Mapping[str, Any], position: int) -> list[float]:
    """The edited logits of one row after the filters of its request, each of which sees what the one before left.

    Parameters that are missing are off; the coin of XTC depends on the position.
    """
    row, temperature = list(logits), params.get("temperature", 1.0)
    ids = oracle.visible(row)
    if temperature == 0.0 or not ids or max(row[i] for i in ids) == math.inf:
        return row
    if params.get("top_n_sigma", 0.0) > 0.0:
        row = keeping(row, near_the_largest(row, params["top_n_sigma"]))
    if params.get("min_k", False):
        row = keeping(row, above_the_cliff(row, params.get("min_k_tau", 3.0)))
    if params.get("p_less", False):
        row = keeping(row, as_likely_as_a_repeat(row, temperature))
    if params.get("typical_p", 1.0) < 1.0:
        row = keeping(row, typical(row, temperature, params["typical_p"]))
    if params.get("xtc_probability", 0.0) > coin(params["seed"], position):
        row = keeping(row, without_top_choices(row, temperature, params.get("xtc_threshold", 0.1)))
    return row


def keeping(logits: Sequence[float], keep: Sequence[int]) -> list[float]:
    """The row with -inf for visible tokens that are not kept; a NaN stays."""
    dropped = set(oracle.visible(logits)) - set(keep)
    return [-math.inf if i in dropped else x for i, x in enumerate(logits)]


def near_the_largest(logits: Sequence[float], number: float) -> list[int]:
    """Tokens within ``number`` standard deviations of the largest logit: all in fractions, squares compared.

    Numbers and distances below the least normal float32 count as 0, distances above the largest as that.
    """
    ids, most = oracle.visible(logits), Fraction(2**128 - 2**104)
    top = normal(Fraction(max(logits[i] for i in ids)))
    away = {i: min(normal(top - normal(Fraction(logits[i]))), most) for i in ids}
    mean = sum(away.values()) / len(ids)
    variance = sum((each - mean) ** 2 for each in away.values()) / len(ids)
    return [i for i in ids if away[i] ** 2 <= Fraction(number) ** 2 * variance]


def above_the_cliff(logits: Sequence[float], tau: float) -> list[int]:
    """Tokens as large as that of rank ``max(cliff, floor(tau / range))``; the cliff is the first steepest drop.

    A drop is divided by its rank, in fractions; drops and the range are rounded to float32, at most the largest.
    """
    ids = oracle.visible(logits)
    x = {i: normal(Fraction(logits[i])) for i in ids}
    ordered = sorted(x.values(), reverse=True)
    drops = [Fraction(difference(*pair), rank) for rank, pair in enumerate(pairwise(ordered), start=1)]
    cliff = 1 + drops.index(max(drops)) if drops else 1
    length = difference(ordered[0], ordered[-1])
    count = max(cliff, len(ids) if length == 0 else math.floor(Fraction(tau) / length))
    return [i for i in ids if x[i] >= ordered[min(count, len(ids)) - 1]]


def difference(high: Fraction, low: Fraction) -> Fraction:
    """``high - low`` of two float32 numbers, rounded to float32, at most the largest; 0 for a denormal.

    Twice rounded is once rounded here: 53 bits are more than twice 24 and two.
    """
    exact = high - low
    return normal(Fraction(float(np.float32(float(min(exact, Fraction(2**128 - 2**104)))))))


def normal(x: Fraction) -> Fraction:
    """The number, 0 for a denormal of float32."""
    return Fraction(0) if abs(x) < Fraction(1, 2**126) else x


def probabilities(logits: Sequence[float], temperature: float) -> list[Fraction]:
    return oracle.exact_law(oracle.masses(logits, temperature), oracle.visible(logits))


def as_likely_as_a_repeat(logits: Sequence[float], temperature: float) -> list[int]:
    """Tokens at least as likely as two draws are to give one token."""
    law = probabilities(logits, temperature)
    repeat = sum(each * each for each in law)
    return [i for i in oracle.visible(logits) if law[i] >= repeat]


def typical(logits: Sequence[float], temperature: float, share: float) -> list[int]:
    """Tokens in the order of the distance of their surprise from the entropy, while the mass before is below a share.

    Tokens as far as the last one stay too. Scaled logits nearer to 0 than 2**-40 count as 0, their mean too.
    """
    law, ids = probabilities(logits, temperature), oracle.visible(logits)
    scaled = [t if t <= -(2.0**-40) else 0.0 for t in oracle.scaled(logits, temperature)]
    mean = sum(float(law[i]) * scaled[i] for i in ids if law[i])
    away = {i: abs(scaled[i] - (mean if mean <= -(2.0**-40) else 0.0)) for i in ids}
    before, last = Fraction(0), math.inf
    for i in sorted(ids, key=away.__getitem__):
        if before >= Fraction(share):
            break
        before, last = before + law[i], away[i]
    return [i for i in ids if away[i] <= last]


def coin(seed: int, position: int) -> Fraction:
    """The uniform number that says whether a draw excludes its top choices."""
    return Fraction(2 * oracle.row_words(seed, position, XTC)[1] + 1, 2**33)


def without_top_choices(logits: Sequence[float], temperature: float, threshold: float) -> list[int]:
    """Tokens from the last in the order that has at least this probability; all where there is none."""
    law, ids = probabilities(logits, temperature), oracle.order(logits)
    is_top = [law[i] >= Fraction(threshold) for i in ids]
    return ids[max(is_top.count(True) - 1, 0) :]
