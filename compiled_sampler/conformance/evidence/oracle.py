"""The law that a token must follow, in float64 and one token at a time, for the semantics that a sampler declares.

Nothing of the sampler is imported here: it is the truth for every target, this package's own included.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled_sampler.conformance.adapter import Params, Semantics

Law = NDArray[np.float64]
Ids = NDArray[np.intp]


def law(logits: NDArray[np.float64], params: Params, semantics: Semantics) -> Law:
    """The probability of every token of a row, float64 ``[V]``; all 0 where every token is masked.

    Args:
        logits: float64 ``[V]``; NaN counts as -inf, and beside +inf only the +inf tokens count.
        params: of the row.
        semantics: choices of the sampler; ties that it leaves open are settled for the lowest id.
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
    """Ids that pass every filter, likeliest first, ties by id.

    Args:
        x: float64 ``[V]``, logits, 0 the largest.
        mass: float64 ``[V]``, of each token, 1 the largest.
        params: of the row.
        semantics: the order of the filters and their choices.
    """
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
