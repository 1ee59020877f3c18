"""Whether the filters keep the winner of a race over the whole row, on the CPU: one pass instead of a search.

The winner of a race over all tokens also wins among the kept tokens if it is kept, that is, if the number and the mass
of the tokens before it in the order are below the limits of top-k and top-p. Only the other rows need their threshold
for a draw; a law needs the threshold of every row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.core.arithmetic.mass import exp2_mass, scaled_logits
from compiled_sampler.core.filters import KEEP_ALL, mass_cut, ordered_logits, top_k_mass
from compiled_sampler.core.order import Last, last_of, reaches
from compiled_sampler.core.rows import RowParams, expand_to
from compiled_sampler.exact.threshold import Threshold, measured_on_row
from compiled_sampler.passes.blocks import logit_blocks


class MassBefore(NamedTuple):
    """The tokens that stand before a token in the order, counted and weighed by blocks."""

    counts: Tensor
    """int64 ``[R, B]``, the number of these tokens."""
    masses: Tensor
    """int64 ``[R, B]``, the mass of these tokens."""


def last_without_search(known: Threshold) -> Last:
    """The last token ``[R]`` that may be kept by what is known without a search; pending rows keep all tokens."""
    return last_of(torch.where(known.is_unknown, KEEP_ALL, known.packed), by_key=True)


def mass_before_winner(
    logits: Tensor, before: Last, row_max: Tensor, scale: Tensor, *, vocab_size: int, block: int
) -> MassBefore:
    """The number and the mass of the tokens that reach ``before``, int64 ``[R, B]`` each, by blocks.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        before: ``[R]``, from ``last_before_winner``.
        row_max: float32 ``[R]``, the largest logit.
        scale: float32 ``[R]``, ``log2(e) / temperature``.
        vocab_size: V.
        block: tokens per block.
    """
    x, ids = logit_blocks(logits, vocab_size, block)
    precedes = reaches(x, ids, Last(*(expand_to(each, x) for each in before)))
    mass = exp2_mass(scaled_logits(x, expand_to(row_max, x), expand_to(scale, x)))
    return MassBefore(precedes.sum(-1), torch.where(precedes, mass, 0).sum(-1))


def recheck_winners(
    ordered: Tensor | None,
    known: Threshold,
    before: MassBefore,
    rows: RowParams,
    *,
    vocab_size: int,
    base_is_row: bool,
) -> Threshold:
    """Thresholds ``[R]`` after a race up to ``last_without_search``: rows stay unknown if their winner may be dropped.

    Where the base of top-p is the mass after a top-k beyond the candidates, the mass of the candidates, which is
    smaller, stands in for it.

    Args:
        ordered: int64 ``[R, C]``, packed keys of the candidates in descending order; None where top-p keeps all.
        known: the thresholds before the race.
        before: the tokens before the winners.
        rows: per-row parameters ``[R]``.
        vocab_size: V.
        base_is_row: whether top-p is a share of the whole row's mass instead of the mass after top-k.
    """
    base = known.row_mass
    if ordered is not None:
        mass = top_k_mass(ordered, ordered_logits(ordered, rows.scale), rows.top_k).sum(-1)
        on_row = measured_on_row(rows.top_k, rows.top_p, vocab_size=vocab_size, base_is_row=base_is_row)
        base = torch.where(on_row, base, mass)
    kept = (before.counts.sum(-1) < rows.top_k) & (before.masses.sum(-1) < mass_cut(rows.top_p, base))
    packed = torch.where(known.is_unknown, KEEP_ALL, known.packed)
    return Threshold(packed, known.is_unknown & ~kept, known.beyond_candidates, known.row_mass)
