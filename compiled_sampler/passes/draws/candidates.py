"""The draw among the candidates of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.batch import SampleOutputs
from compiled_sampler.core.filters import keep_candidates
from compiled_sampler.core.order import MASKED_KEY, key_float, pack, packed_id, packed_key
from compiled_sampler.core.rows import RowSlots, gather_rows
from compiled_sampler.core.score import score_key
from compiled_sampler.passes.laws.kept import Kept, kept_candidates
from compiled_sampler.passes.maxima import largest_magnitude
from compiled_sampler.passes.ranking import sort
from compiled_sampler.passes.tokens import tokens_from_packed


def draw_from_candidates(
    ordered: Tensor, magnitudes: Tensor, row_slots: RowSlots, row_mass: Tensor | None, *, stream: int
) -> SampleOutputs:
    """The winner of the race among the candidates that pass the filters, ``[R]``, for rows with ``top_k <= C``.

    Args:
        ordered: int64 ``[R, C]``, packed (order key, id) of the first C tokens in descending order.
        magnitudes: int32 ``[R, B]``, ``nan_bits`` of the parts of each row.
        row_slots: ``[R]``, the slot and the position of each row.
        row_mass: int64 ``[R]``, the base of top-p; None takes the mass after top-k.
        stream: the noise stream, see noise.py.
    """
    rows = gather_rows(row_slots, stream=stream)
    keep = keep_candidates(ordered, rows, row_mass)
    ids = packed_id(ordered).to(torch.int32)
    key = score_key(key_float(packed_key(ordered)), ids, rows)
    best = pack(torch.where(keep, key, MASKED_KEY), ids).amax(-1)
    return tokens_from_packed(best, largest_magnitude(magnitudes, ordered.shape[1]), rows.idle)


def draw_from_unordered_candidates(
    chosen: Tensor, magnitudes: Tensor, row_slots: RowSlots, row_mass: Tensor | None, *, stream: int
) -> SampleOutputs:
    """``draw_from_candidates`` for candidates in any order, ``chosen``, int64 ``[R, C]``; other arguments as there."""
    ordered = sort(chosen, count=chosen.shape[1])
    return draw_from_candidates(ordered, magnitudes, row_slots, row_mass, stream=stream)


def draw_and_keep(
    chosen: Tensor,
    magnitudes: Tensor,
    row_slots: RowSlots,
    row_mass: Tensor | None,
    *,
    stream: int,
    is_ordered: bool,
    by_key: bool,
) -> tuple[SampleOutputs, Kept, Tensor]:
    """``draw_from_candidates``, the tokens that the filters keep ``[R]``, and the candidates in order, ``[R, C]``.

    Args:
        chosen: int64 ``[R, C]``, packed (order key, id) of the first C tokens.
        magnitudes: int32 ``[R, B]``, ``nan_bits`` of the parts of each row.
        row_slots: ``[R]``, the slot and the position of each row.
        row_mass: int64 ``[R]``, the base of top-p; None takes the mass after top-k.
        stream: the noise stream, see noise.py.
        is_ordered: whether the candidates are in descending order.
        by_key: whether the last kept token is given by its key.
    """
    ordered = chosen if is_ordered else sort(chosen, count=chosen.shape[1])
    drawn = draw_from_candidates(ordered, magnitudes, row_slots, row_mass, stream=stream)
    return drawn, kept_candidates(ordered, row_slots, row_mass, by_key=by_key), ordered
