"""Which tokens of a row pass its filters, as one cut, and the weight of every token in integers.

Weights come from the masses and the thresholds that the filters use, so a filter cannot hold in one place and not in
the other.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.core.arithmetic.mass import MASS_BITS, exp2_mass, exp2_units, scaled_logits
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.order import Last, key_float, last_of, pack, packed_id, packed_key, reaches
from compiled_sampler.core.rows import RowParams, RowSlots, expand_to, gather_rows
from compiled_sampler.passes.fusion import kept_in_kernel
from compiled_sampler.passes.maxima import BlockMaxima


class Cut(NamedTuple):
    """The tokens that pass the filters of a row, as one threshold, and the units of their weights."""

    row_max: Tensor
    """float32 ``[R]``, the largest logit."""
    scale: Tensor
    """float32 ``[R]``."""
    min_p_log2: Tensor | None
    """float32 ``[R]``; None where the mode applies no min_p."""
    threshold: Tensor | Last | None
    """The last token that top-k and top-p keep, int64 ``[R]`` packed, or by its key; None where neither is applied."""
    only: Tensor | None
    """int64 ``[R]``, in a cut without a threshold: the single token of a greedy row, -1 for other rows."""


def cut_at_threshold(threshold: Tensor | Last, row_max: Tensor, rows: RowParams) -> Cut:
    """The cut ``[R]`` of rows whose threshold is known from a search."""
    return Cut(row_max, rows.scale, rows.min_p_log2, threshold, None)


def unfiltered_cut(blocks: BlockMaxima, row_slots: RowSlots, *, filters_min_p: bool) -> tuple[Cut, Tensor]:
    """The cut ``[R]`` of rows without top-k and top-p, where greedy rows keep their first token, and ``nan_bits``.

    Args:
        blocks: the ``order_maxima`` ``[R, B]``, with token ids.
        row_slots: ``[R]``, the slot and the position of each row.
        filters_min_p: whether the mode applies min_p; a greedy row needs none.

    Returns:
        The cut ``[R]``, and the ``nan_bits`` of the rows, int32 ``[R]``, 0 for padding.
    """
    assert blocks.token_ids is not None
    rows = gather_rows(row_slots, stream=TARGET)  # the noise is not used
    first = pack(blocks.keys, blocks.token_ids).amax(-1)
    cut = _cut_of_first(key_float(packed_key(first)), packed_id(first), rows, filters_min_p=filters_min_p)
    return cut, kept_in_kernel(rows.live, blocks.magnitudes.amax(-1), 0)


def cut_of_drawn(row_max: Tensor, token_ids: Tensor, row_slots: RowSlots, *, filters_min_p: bool) -> Cut:
    """The ``unfiltered_cut`` ``[R]`` of rows that were drawn, as the token of a greedy row is the first of its order.

    Of a row without a token ``only`` is -1: none of its tokens is visible, or it is padding.

    Args:
        row_max: float32 ``[R]``, the largest logit.
        token_ids: int64 ``[R]``, the tokens drawn; -1 for a row that is all masked.
        row_slots: ``[R]``, the slot and the position of each row.
        filters_min_p: whether the mode applies min_p.
    """
    rows = gather_rows(row_slots, stream=TARGET)  # the noise is not used
    return _cut_of_first(row_max, token_ids, rows, filters_min_p=filters_min_p)


def _cut_of_first(row_max: Tensor, first: Tensor, rows: RowParams, *, filters_min_p: bool) -> Cut:
    """The cut of rows without top-k and top-p, of which a greedy one keeps its first token, int64 ``[R]``, alone."""
    only = torch.where(rows.noise_mask == 0, first, -1)
    return Cut(row_max, rows.scale, rows.min_p_log2 if filters_min_p else None, None, only)


def passes(x: Tensor, ids: Tensor, t: Tensor, cut: Cut) -> Tensor | None:
    """Mask of the visible tokens that the filters keep, from logits and scaled logits; None where none filters."""
    kept = []
    if cut.min_p_log2 is not None:
        kept.append(t >= expand_to(cut.min_p_log2, x))
    if cut.threshold is not None:
        kept.append(reaches(x, ids, Last(*(expand_to(each, x) for each in unpacked(cut.threshold)))))
    if cut.only is not None:
        only = expand_to(cut.only, x)
        kept.append((ids == only) | (only < 0))
    return functools.reduce(operator.and_, kept) if kept else None


def unpacked(threshold: Tensor | Last) -> Last:
    """The last token of a ``Cut``, by its logit unless its key is given."""
    return threshold if isinstance(threshold, Last) else last_of(threshold, by_key=False)


def weight(values: Tensor, ids: Tensor, cut: Cut | None) -> Tensor:
    """The weight of tokens in their row's law, int64, the shape of ``values``; 0 where a filter drops the token.

    Args:
        values: float32 ``[R, ...]``, logits, or probabilities where ``cut`` is None.
        ids: int32 token ids, broadcastable to ``values``.
        cut: the cut of each row ``[R]``.
    """
    return _weighed(values, ids, cut, probability_mass, exp2_mass)


def weight_units(values: Tensor, ids: Tensor, cut: Cut | None) -> Tensor:
    """``weight`` as float32, which represents each weight exactly."""
    return _weighed(values, ids, cut, probability_units, exp2_units)


def _weighed(
    values: Tensor,
    ids: Tensor,
    cut: Cut | None,
    of_probability: Callable[[Tensor], Tensor],
    of_scaled_logit: Callable[[Tensor], Tensor],
) -> Tensor:
    """Weights by the given functions of a probability or of a scaled logit, 0 where a filter drops the token."""
    if cut is None:
        return of_probability(values)
    t = scaled_logits(values, expand_to(cut.row_max, values), expand_to(cut.scale, values))
    keep, weights = passes(values, ids, t, cut), of_scaled_logit(t)
    return weights if keep is None else torch.where(keep, weights, 0)


def probability_mass(probabilities: Tensor) -> Tensor:
    """Probabilities, float32, as int64 in units of ``2**-40``, truncated towards zero; NaN and negative ones give 0."""
    return _scaled_probability(probabilities).to(torch.int64)


def probability_units(probabilities: Tensor) -> Tensor:
    """``probability_mass`` as float32, which represents each value exactly."""
    return _scaled_probability(probabilities).trunc()


def _scaled_probability(probabilities: Tensor) -> Tensor:
    p = torch.where(probabilities > 0.0, probabilities, 0.0)
    return torch.where(p < 1.0, p, 1.0) * 2.0**MASS_BITS
