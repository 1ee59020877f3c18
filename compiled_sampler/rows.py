"""From slots to rows: gather each row's parameters and derive the keys of its noise."""

from __future__ import annotations

from torch import Tensor

from compiled_sampler.batch import Rows, SlotTable
from compiled_sampler.noise import noise_keys


def gather_rows(table: SlotTable, slots: Tensor, positions: Tensor, *, stream: int) -> Rows:
    """The parameters of each row; a padding row borrows those of slot 0 and is not live.

    Args:
        table: per-slot parameters ``[S]``.
        slots: int64 ``[R]``; -1 for padding.
        positions: int64 ``[R]``.
        stream: the noise stream of the draw, see noise.py.

    Returns:
        Per-row parameters ``[R]``.
    """
    slot = slots.clamp(min=0)
    return Rows(
        live=slots >= 0,
        keys=noise_keys(table.seeds[slot], positions, stream),
        scale=table.scale[slot],
        noise_mask=table.noise_mask[slot],
        top_k=table.top_k[slot],
        top_p=table.top_p[slot],
        min_p_log2=table.min_p_log2[slot],
    )
