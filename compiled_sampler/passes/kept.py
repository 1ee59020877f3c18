"""The tokens that pass a row's filters, as one cut: their weights in integers, and what is summed over them.

Weights come from the masses and the thresholds that the filters use, so a filter cannot hold in one place and not in
the other. Every sum is of integers and every other reduction a minimum, so no result depends on how a row is cut into
blocks. All masses are relative to the maximum of their row.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.core.filters import DROPPED, keep_candidates, largest_of, last_kept, ordered_logits
from compiled_sampler.core.mass import MASS_BITS, exp2_mass, exp2_moment, exp2_units, scaled_logits
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.order import (
    MASKED_KEY,
    Last,
    is_visible,
    key_float,
    last_of,
    order_key,
    pack,
    packed_id,
    packed_key,
    reaches,
)
from compiled_sampler.core.rows import RowParams, RowSlots, expand_to, gather_rows
from compiled_sampler.core.stage import holds
from compiled_sampler.passes.blocks import AnyLogits, gather_logits, logit_blocks
from compiled_sampler.passes.maxima import BlockMaxima, kept_in_kernel


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
    """The cut ``[R]`` of rows without top-k and top-p, where greedy rows keep their first token, and ``nan_bits``."""
    assert blocks.token_ids is not None
    rows = gather_rows(row_slots, stream=TARGET)  # the noise is not used
    first = pack(blocks.keys, blocks.token_ids).amax(-1)
    cut = _cut_of_first(key_float(packed_key(first)), packed_id(first), rows, filters_min_p=filters_min_p)
    return cut, kept_in_kernel(rows.live, blocks.nan_bits.amax(-1), 0)


def cut_of_drawn(row_max: Tensor, token_ids: Tensor, row_slots: RowSlots, *, filters_min_p: bool) -> Cut:
    """The ``unfiltered_cut`` ``[R]`` of rows whose tokens are drawn: that of a greedy row is the first of its order."""
    # A row whose token is -1 has no visible tokens, or is padding.
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
        kept.append(reaches(x, ids, Last(*(expand_to(field, x) for field in unpacked(cut.threshold)))))
    if cut.only is not None:
        only = expand_to(cut.only, x)
        kept.append((ids == only) | (only < 0))
    return functools.reduce(operator.and_, kept) if kept else None


def unpacked(threshold: Tensor | Last) -> Last:
    """The last token of a ``Cut``, by its logit unless its key is given."""
    return threshold if isinstance(threshold, Last) else last_of(threshold, by_key=False)


def weight(values: Tensor, ids: Tensor, cut: Cut | None) -> Tensor:
    """The weight of tokens in their row's law, int64, the shape of ``values``; 0 where a filter drops the token."""
    # The values are probabilities where cut is None, else logits.
    return _weighed(values, ids, cut, probability_mass, exp2_mass)


def weight_units(values: Tensor, ids: Tensor, cut: Cut | None) -> Tensor:
    """``weight`` as float32, which represents each weight exactly."""
    return _weighed(values, ids, cut, probability_units, exp2_units)


def _weighed(
    values: Tensor,
    ids: Tensor,
    cut: Cut | None,
    probability_weight: Callable[[Tensor], Tensor],
    logit_weight: Callable[[Tensor], Tensor],
) -> Tensor:
    """Weights by the given functions of a probability or of a scaled logit, 0 where a filter drops the token."""
    if cut is None:
        return probability_weight(values)
    t = scaled_logits(values, expand_to(cut.row_max, values), expand_to(cut.scale, values))
    keep, weights = passes(values, ids, t, cut), logit_weight(t)
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


class Kept(NamedTuple):
    """The visible tokens that pass a cut, and sums over them: of each row ``[R]``, or of its blocks ``[R, B]``."""

    cut: Cut
    """``[R]``, which tokens they are, and the unit of their masses."""
    total: Tensor
    """int64, the mass."""
    moment: Tensor | None
    """int64, the sum of ``-2**t * t``, in the units of masses; None where no entropy is asked for."""
    num_kept: Tensor | None
    """int64, the number of these tokens; None where it is not asked for."""
    last: Tensor | None
    """int64, the last of these tokens in the order, packed (order key, id); None where it is not asked for."""


def greedy_kept(blocks: BlockMaxima, row_slots: RowSlots) -> Kept:
    """The kept token of each greedy row ``[R]``, without another pass; of other rows only the cut has a meaning."""
    cut, _ = unfiltered_cut(blocks, row_slots, filters_min_p=False)
    return _one_token(cut)


def _one_token(cut: Cut) -> Kept:
    """The kept token of rows that keep their first one alone ``[R]``; none where it is not visible."""
    assert cut.only is not None
    one = is_visible(cut.row_max).to(torch.int64)
    return Kept(cut, one << MASS_BITS, one - one, one, pack(order_key(cut.row_max), cut.only))


def kept_of_token(logits: AnyLogits, token_ids: Tensor, row_slots: RowSlots, *, vocab_size: int) -> Kept:
    """``greedy_kept`` ``[R]`` of rows whose first token is known."""
    ids = token_ids[:, None]
    x = torch.where(ids >= 0, gather_logits(logits, ids, vocab_size), float("-inf"))
    key = order_key(x)
    return greedy_kept(BlockMaxima(key, key, ids.clamp(min=0).to(torch.int32)), row_slots)


@holds(tokens=True)
def kept_in_blocks(
    logits: AnyLogits, cut: Cut, *, vocab_size: int, block: int, moment: bool, num_kept: bool, last: bool
) -> Kept:
    """The kept tokens of each block, ``[R, B]``; of a greedy row as if it kept all, which ``sum_kept`` mends."""
    x, ids = logit_blocks(logits, vocab_size, block)
    t = scaled_logits(x, expand_to(cut.row_max, x), expand_to(cut.scale, x))  # of no visible token: no mass
    keep, is_kept = is_visible(x), passes(x, ids, t, cut._replace(only=None))
    if is_kept is not None:
        keep, t = keep & is_kept, torch.where(is_kept, t, float("-inf"))  # a select of 32 bits instead of one of a mass
    return Kept(
        cut,
        exp2_mass(t).sum(-1),
        exp2_moment(t).sum(-1) if moment else None,
        keep.to(torch.int32).sum(-1, dtype=torch.int32) if num_kept else None,
        torch.where(keep, pack(order_key(x), ids), DROPPED).amin(-1) if last else None,
    )


def sum_kept(parts: Kept) -> Kept:
    """The kept tokens of each row ``[R]`` from those of its blocks ``[R, B]``; of a greedy row its first one."""
    summed = Kept(
        parts.cut,
        parts.total.sum(-1),
        None if parts.moment is None else parts.moment.sum(-1),
        None if parts.num_kept is None else parts.num_kept.sum(-1, dtype=torch.int64),
        None if parts.last is None else parts.last.amin(-1),
    )
    only = parts.cut.only
    if only is None:
        return summed
    one = _one_token(parts.cut)

    def greedy_or_summed(first: Tensor | None, every: Tensor | None) -> Tensor | None:
        return None if first is None or every is None else torch.where(only >= 0, first, every)

    total = torch.where(only >= 0, one.total, summed.total)
    return Kept(parts.cut, total, *(greedy_or_summed(*pair) for pair in zip(one[2:], summed[2:], strict=True)))


def kept_candidates(ordered: Tensor, row_slots: RowSlots, row_mass: Tensor | None, *, by_bits: bool) -> Kept:
    """The kept tokens of each row ``[R]`` whose filters end within the candidates, ``top_k <= C``."""
    # row_mass is the base of top-p; None takes the mass after top-k. by_bits as in law.candidate_law.
    rows = gather_rows(row_slots, stream=TARGET)  # the noise is not used
    t = ordered_logits(ordered, rows.scale)
    prefix = keep_candidates(ordered, rows, row_mass)
    keep = prefix & (packed_key(ordered) > MASKED_KEY)
    last = last_kept(ordered, prefix)
    cut = Cut(largest_of(ordered), rows.scale, None, last if by_bits else last_of(last, by_key=True), None)
    return Kept(
        cut,
        torch.where(keep, exp2_mass(t), 0).sum(-1),
        torch.where(keep, exp2_moment(t), 0).sum(-1),
        keep.to(torch.int64).sum(-1),
        torch.where(keep, ordered, DROPPED).amin(-1),
    )
