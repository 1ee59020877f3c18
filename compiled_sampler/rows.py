"""From slots to rows: gather each row's parameters and derive the keys of its noise."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from compiled_sampler.batch import Rows, SlotTable
from compiled_sampler.noise import noise_keys


def gather_rows(
    table: SlotTable, slots: Tensor, positions: Tensor, offsets: Tensor | None = None, *, stream: int | Tensor
) -> Rows:
    """The parameters of each row; a padding row borrows those of slot 0 and is not live.

    Args:
        table: per-slot parameters ``[S]``.
        slots: int64 ``[R]``; -1 for padding.
        positions: int64 ``[R]``.
        offsets: int64 ``[R]``, the place of the token in its block of drafts; None outside of one.
        stream: the noise stream of the draw, see noise.py; int64 ``[R]`` for one of each row's own.

    Returns:
        Per-row parameters ``[R]``.
    """
    slot = slots.clamp(min=0)
    return Rows(
        live=slots >= 0,
        keys=noise_keys(table.seeds[slot], positions, stream, offsets),
        scale=table.scale[slot],
        noise_mask=table.noise_mask[slot],
        top_k=table.top_k[slot],
        top_p=table.top_p[slot],
        min_p_log2=table.min_p_log2[slot],
    )


def take(values: Any, index: Tensor) -> Any:
    """The rows of every tensor inside nested tuples: ``[R, ...]`` to ``[len(index), ...]``; None stays."""
    if isinstance(values, Tensor):
        return values[index]
    if isinstance(values, tuple):
        return type(values)(*(take(value, index) for value in values))
    return values


def expand_to(per_row: Tensor, like: Tensor) -> Tensor:
    """``[R]`` viewed as ``[R, 1, ...]`` with the dimensions of ``like``."""
    return per_row.view(-1, *(1,) * (like.dim() - 1))
