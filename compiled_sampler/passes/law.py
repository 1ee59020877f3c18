"""The law of a row in integers: the weights of the tokens that pass its cut, and their exact total.

Sampling needs no total; verification and ``probs`` do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import DraftTable, ProbabilityOutputs, RowStatus
from compiled_sampler.core.arithmetic import reciprocal
from compiled_sampler.core.filters import keep_candidates, largest_of, last_kept, ordered_logits
from compiled_sampler.core.mass import MASS_BITS, exp2_mass
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.order import POSITIVE_INFINITY_KEY, is_visible, last_of, row_logits
from compiled_sampler.core.rows import RowSlots, gather_rows, idle_status
from compiled_sampler.core.stage import holds
from compiled_sampler.passes.blocks import all_rows, logit_blocks, own_tokens, rows_in_windows
from compiled_sampler.passes.kept import Cut, probability_mass, unfiltered_cut, weight
from compiled_sampler.passes.maxima import BlockMaxima, kept_in_kernel, largest_in_each, nan_bits_of, row_nan_bits


class Law(NamedTuple):
    """The distribution of each row in integers: the probability of a token is its weight divided by the total."""

    cut: Cut | None
    """The map from logits to weights; None where the row holds probabilities."""
    total: Tensor
    """int64 ``[R]``, the sum of the weights."""
    inverse: Tensor
    """float64 ``[R]``, ``1 / total``; 0 where the total is 0."""
    status: Tensor
    """int32 ``[R]``, the ``RowStatus`` flags that follow from the logits alone."""


class LawBlocks(NamedTuple):
    """A law whose sums ``sum_law`` has yet to take."""

    cut: Cut | None
    """As in ``Law``."""
    weights: Tensor
    """int64 ``[R, B]``, weights of the parts of each row."""
    nan_bits: Tensor | None
    """int32 ``[R, ...]``, ``nan_bits`` of the parts of each row; None where no status is needed."""


class UnfilteredLaw(NamedTuple):
    """The law of rows without top-k and top-p, whose cut and sums ``sum_law`` has yet to take."""

    blocks: BlockMaxima
    """The ``order_maxima`` ``[R, B]``, with token ids."""
    row_slots: RowSlots
    """The slot and the position of each row ``[R]``."""
    weights: Tensor
    """int64 ``[R, B]``, weights of the blocks."""


AnyLaw = Law | LawBlocks | UnfilteredLaw


def candidate_law(
    ordered: Tensor, nan_bits: Tensor, row_slots: RowSlots, row_mass: Tensor | None, *, by_bits: bool
) -> Law:
    """The law of rows whose filters end within the candidates; arguments as ``race.draw_from_candidates``."""
    # Unless by_bits, the last token that is kept is given by its key.
    rows = gather_rows(row_slots, stream=TARGET)  # the noise is not used
    keep = keep_candidates(ordered, rows, row_mass)
    weights = torch.where(keep, exp2_mass(ordered_logits(ordered, rows.scale)), 0)
    last = last_kept(ordered, keep)
    threshold = last if by_bits else last_of(last, by_key=True)
    cut = Cut(largest_of(ordered), rows.scale, rows.min_p_log2, threshold, None)
    return _law(cut, weights.sum(-1), row_nan_bits(nan_bits, ordered.shape[1]))


@holds(tokens=True)
def unfiltered_weights(
    logits: Tensor | DraftTable,
    row_ids: Tensor | None,
    keys: Tensor,
    row_slots: RowSlots,
    *,
    vocab_size: int,
    block: int,
    filters_min_p: bool,
    per_block: bool = False,
) -> Tensor:
    """The weight of each block of rows without top-k and top-p, int64 ``[n, B]``."""
    # A greedy row, which keeps one token, is weighed as if it kept all. keys are those of parts of the n rows.
    slots = row_slots.slots.clamp(min=0)
    if row_ids is None:
        x, ids = logit_blocks(all_rows(logits), vocab_size, block)
    else:
        x, ids = rows_in_windows(logits, row_ids, vocab_size, block)
    row_max = largest_in_each(keys, ids.shape[0], block, per_block=per_block)
    min_p_log2 = row_slots.table.min_p_log2[slots] if filters_min_p else None
    weights = weight(x, ids, Cut(row_max, row_slots.table.scale[slots], min_p_log2, None, None))
    return (weights if row_ids is None else torch.where(own_tokens(ids, block), weights, 0)).sum(-1)


@holds(tokens=True)
def weight_blocks(logits: Tensor, cut: Cut, *, vocab_size: int, block: int) -> Tensor:
    """The weight of each block of a row, int64 ``[R, B]``."""
    x, ids = logit_blocks(logits, vocab_size, block)
    return weight(x, ids, cut).sum(-1)


@holds(tokens=True)
def probability_blocks(
    probabilities: Tensor, *, vocab_size: int, block: int, looks: bool, by_bits: bool = False
) -> LawBlocks:
    """The weight of each block of a row of probabilities, int64 ``[R, B]``, and, if ``looks``, its ``nan_bits``."""
    p, _ = logit_blocks(probabilities, vocab_size, block)
    return LawBlocks(None, probability_mass(p).sum(-1), nan_bits_of(p, by_bits=by_bits) if looks else None)


def sum_law(law: AnyLaw, *, filters_min_p: bool = False) -> Law:
    """The law of rows with its sums taken; ``filters_min_p`` says if the mode of a ``UnfilteredLaw`` applies min_p."""
    if isinstance(law, Law):
        return law
    if isinstance(law, UnfilteredLaw):
        cut, nan_bits = unfiltered_cut(law.blocks, law.row_slots, filters_min_p=filters_min_p)
        return _law(cut, law.weights.sum(-1), nan_bits)
    parts = law.weights
    seen = None if law.nan_bits is None else row_nan_bits(law.nan_bits, parts.shape[1])
    return _law(law.cut, parts.sum(-1), seen)


@holds(tokens=True)
def probabilities(logits: Tensor, law: Law, row_slots: RowSlots, *, vocab_size: int) -> ProbabilityOutputs:
    """Probabilities, float32 ``[R, V]``: exact zeros where a filter drops a token; each row sums to 1 within 1e-6."""
    x = row_logits(logits, vocab_size)
    ids = torch.arange(vocab_size, device=logits.device).to(torch.int32)
    share = torch.where(idle_status(row_slots.table, row_slots.slots) == 0, law.inverse, 0.0)[:, None]
    return ProbabilityOutputs((weight(x, ids, law.cut).to(torch.float64) * share).to(torch.float32))


def _law(cut: Cut | None, total: Tensor, nan_bits: Tensor | None) -> Law:
    if cut is not None and cut.only is not None:  # the only token of a greedy row weighs 1 if it is visible
        one = torch.where(is_visible(cut.row_max), 1 << MASS_BITS, 0)
        total = torch.where(cut.only >= 0, one, total)
    status = kept_in_kernel(total < 0, 1, 0)  # zeros, because no total is negative
    if nan_bits is not None:
        status = torch.where(nan_bits > POSITIVE_INFINITY_KEY, int(RowStatus.NAN_SEEN), 0)
    if cut is not None:
        infinite = cut.row_max * cut.scale == float("inf")
        status = status | torch.where(infinite, int(RowStatus.POSITIVE_INFINITY), 0)
    return Law(cut, total, reciprocal(total.to(torch.float64)), status.to(torch.int32))
