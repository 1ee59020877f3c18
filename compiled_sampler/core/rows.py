"""From slots to rows: gather each row's parameters and derive the keys of its noise."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from compiled_sampler.batch import SlotTable
from compiled_sampler.core.noise import NoiseKeys, noise_keys


def gather_rows(entries: Entries, *, stream: int | Tensor) -> Rows:
    """The parameters of each row.

    Args:
        entries: ``[R]``.
        stream: the noise stream of the draw, see noise.py; int64 ``[R]`` for one of each row's own.

    Returns:
        Per-row parameters ``[R]``.
    """
    table, slots, positions, offsets = entries
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
    """``[R, ...]`` viewed as ``[R, ..., 1, ...]`` with the dimensions of ``like``."""
    return per_row.view(*per_row.shape, *(1,) * (like.dim() - per_row.dim()))


class Entries(NamedTuple):
    """Where the parameters and the noise of each row come from."""

    table: SlotTable
    """Parameters by slot, ``[S]``."""
    slots: Tensor
    """int64 ``[R]``; -1 for padding, which borrows the parameters of slot 0 and is not live."""
    positions: Tensor
    """int64 ``[R]``, of the token that is drawn."""
    offsets: Tensor | None = None
    """int64 ``[R]``, the place of the token in its block of drafts; None outside of one."""


class Rows(NamedTuple):
    """The parameters of each row, gathered from its slot."""

    live: Tensor
    """bool ``[R]``, false for padding."""
    keys: NoiseKeys
    """int32 ``[R]`` each."""
    scale: Tensor
    """float32 ``[R]``."""
    noise_mask: Tensor
    """int32 ``[R]``."""
    top_k: Tensor
    """int64 ``[R]``."""
    top_p: Tensor
    """float64 ``[R]``."""
    min_p_log2: Tensor
    """float32 ``[R]``."""
