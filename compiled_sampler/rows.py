"""From slots to rows: gather each row's parameters and derive the keys of its noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_sampler.batch import Entries, Rows
from compiled_sampler.maxima import largest_logit
from compiled_sampler.noise import noise_keys


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


def rows_of_blocks(keys: Tensor, entries: Entries, *, stream: int) -> tuple[Rows, Tensor]:
    """``gather_rows`` and the largest logit of each row, float32 ``[R]``, from order keys ``[R, B]`` of its blocks."""
    rows = gather_rows(entries, stream=stream)
    return rows, _largest_of_live(keys, rows.live)


def mass_units(keys: Tensor, entries: Entries) -> tuple[Tensor, Tensor]:
    """What a row's masses are measured in: its largest logit and its scale, float32 ``[R]`` each.

    Args:
        keys: int32 ``[R, B]``, order keys of the row's blocks.
        entries: ``[R]``.
    """
    return _largest_of_live(keys, entries.slots >= 0), entries.table.scale[entries.slots.clamp(min=0)]


def _largest_of_live(keys: Tensor, live: Tensor) -> Tensor:
    """The largest logit of each row; of padding -inf.

    As it then reads the slots too, Inductor makes one kernel of it and of what is gathered by them.
    """
    return torch.where(live, largest_logit(keys), float("-inf"))


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
