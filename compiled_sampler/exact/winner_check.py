"""Whether the winner of a race over the whole row is kept, on the CPU: one pass instead of a search.

The winner of a race over all tokens wins among those that are kept too, if it is one of them: that is, if what stands
before it in the order is below the limits of top-k and top-p. Only the other rows need their threshold, for a draw; a
law needs it of every row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.core.filters import KEEP_ALL, mass_cut, ordered_logits, top_k_mass
from compiled_sampler.core.mass import exp2_mass, scaled_logits
from compiled_sampler.core.order import Last, last_of, reaches
from compiled_sampler.core.rows import Rows, expand_to
from compiled_sampler.exact.threshold import Threshold, measured_on_row
from compiled_sampler.passes.blocks import gather_logits, logit_blocks


class Preceding(NamedTuple):
    """What stands before a token in the order, by blocks."""

    counts: Tensor
    """int64 ``[R, B]``, how many tokens."""
    masses: Tensor
    """int64 ``[R, B]``, their mass."""


def unsearched_last(known: Threshold) -> Last:
    """The last token that may be kept by what is known without a search: ``[R]``."""
    return last_of(torch.where(known.pending, KEEP_ALL, known.packed))


def last_before(logits: Tensor, token_ids: Tensor, *, vocab_size: int) -> Last:
    """What the tokens before the given ones reach, and they themselves do not.

    Id -1 stands for no token, and what it gives is of no use: such a row has no winner under any threshold. It is a
    stage of its own for the reason that ``last_of`` has.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        token_ids: int64 ``[R]``.
        vocab_size: V.
    """
    return Last(gather_logits(logits, token_ids[:, None], vocab_size)[:, 0], (token_ids - 1).to(torch.int32))


def preceding(
    logits: Tensor, before: Last, row_max: Tensor, scale: Tensor, *, vocab_size: int, block: int
) -> Preceding:
    """The number and the mass of the tokens that reach ``before``.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        before: ``[R]``, from ``last_before``.
        row_max: float32 ``[R]``, the largest logit.
        scale: float32 ``[R]``, ``log2(e) / temperature``.
        vocab_size: V.
        block: tokens a block.
    """
    x, ids = logit_blocks(logits, vocab_size, block)
    precedes = reaches(x, ids, Last(*(expand_to(each, x) for each in before)))
    mass = exp2_mass(scaled_logits(x, expand_to(row_max, x), expand_to(scale, x)))
    return Preceding(precedes.sum(-1), torch.where(precedes, mass, 0).sum(-1))


def settled(
    ordered: Tensor | None,
    known: Threshold,
    before: Preceding,
    rows: Rows,
    *,
    vocab_size: int,
    base_is_row: bool,
) -> Threshold:
    """What is known after a race to ``unsearched_last``: only rows whose winner may be dropped are still pending.

    Where the base of top-p is the mass after a top-k beyond the candidates, their mass stands in for it, which is less.

    Args:
        ordered: int64 ``[R, C]``, packed keys of the candidates in descending order; None where top-p keeps all.
        known: what was known before.
        before: what stands before the winners.
        rows: per-row parameters ``[R]``.
        vocab_size: V.
        base_is_row: whether top-p is measured on the whole row rather than on the mass after top-k.
    """
    base = known.row_mass
    if ordered is not None:
        mass = top_k_mass(ordered, ordered_logits(ordered, rows.scale), rows.top_k).sum(-1)
        on_row = measured_on_row(rows.top_k, rows.top_p, vocab_size=vocab_size, base_is_row=base_is_row)
        base = torch.where(on_row, base, mass)
    kept = (before.counts.sum(-1) < rows.top_k) & (before.masses.sum(-1) < mass_cut(rows.top_p, base))
    packed = torch.where(known.pending, KEEP_ALL, known.packed)
    return Threshold(packed, known.pending & ~kept, known.beyond, known.row_mass)
