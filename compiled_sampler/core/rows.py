"""From slots to rows: the parameters of each row, gathered from its slot, and the keys of its noise."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import AnyTable, RowEntries, RowStatus, SampleInputs, SlotTable
from compiled_sampler.core.noise import DRAFT, TARGET, NoiseKeys, noise_keys


class RowSlots(NamedTuple):
    """The slot and the position of each row, from which its parameters and its noise follow."""

    table: AnyTable
    """Parameters by slot, ``[S]``."""
    slots: Tensor
    """int64 ``[R]``; below 0 for padding, which reads the parameters of slot 0 and is not live."""
    positions: Tensor
    """int64 ``[R]``, of the token to draw."""
    offsets: Tensor | None = None
    """int64 ``[R]``, the offset of the token in its block of drafts; None outside of a block."""
    draw_index: Tensor | None = None
    """int64 ``[R]``, which of several draws of the position; None for 0."""

    @property
    def stream(self) -> int:
        """The noise of a draw: a draft in a block has noise of its own."""
        return TARGET if self.offsets is None else DRAFT


def row_slots_of(inputs: SampleInputs) -> RowSlots:
    """The slot and the position of each row of a step that samples."""
    return RowSlots(inputs.table, inputs.slots, inputs.positions, inputs.offsets, inputs.draw_index)


class RowParams(NamedTuple):
    """The parameters of each row, gathered from its slot; units as in ``SlotTable``."""

    live: Tensor  # bool ``[R]``, false for rows that draw nothing: padding, and requests that the step does not cover
    idle: Tensor  # int32 ``[R]``, from ``idle_status``
    keys: NoiseKeys  # int32 ``[R]`` each, the noise keys
    scale: Tensor  # float32 ``[R]``
    noise_mask: Tensor  # int32 ``[R]``
    top_k: Tensor  # int64 ``[R]``
    top_p: Tensor  # float64 ``[R]``
    min_p_log2: Tensor  # float32 ``[R]``


def with_scale(row_slots: RowSlots, scale: Tensor) -> RowSlots:
    """The same rows with another scale by slot, float32 ``[S]``."""
    table, slots, positions, offsets, draw_index = row_slots
    return RowSlots(table._replace(scale=scale), slots, positions, offsets, draw_index)


def gather_rows(row_slots: RowSlots, *, stream: int | Tensor) -> RowParams:
    """The parameters and noise keys of each row, ``[R]`` each."""
    table, slots, positions, offsets, draw_index = row_slots
    slot = slots.clamp(min=0)
    idle = _idle(slots, None if isinstance(table, RowEntries) else table.needs[slot] & table.unserved)
    return RowParams(
        live=idle == 0,
        idle=idle,
        keys=noise_keys(table.seeds[slot], positions, stream, offsets, draw_index),
        scale=table.scale[slot],
        noise_mask=table.noise_mask[slot],
        top_k=table.top_k[slot],
        top_p=table.top_p[slot],
        min_p_log2=table.min_p_log2[slot],
    )


def idle_status(table: AnyTable, slots: Tensor) -> Tensor:
    """The status of rows that draw nothing, int32 ``[R]``: -1 for padding, or ``NOT_COVERED``; 0 for live rows."""
    if isinstance(table, RowEntries):
        return _idle(slots, None)
    # An index that is asserted is a barrier, which greedy's last kernel would wait for: it is clamped instead.
    slot = slots.clamp(0, table.needs.shape[0] - 1)
    return _idle(slots, torch.ops.aten._unsafe_index(table.needs, [slot]) & table.unserved)


def _idle(slots: Tensor, lacking: Tensor | None) -> Tensor:
    """``idle_status`` of rows whose requests lack these services, int64 ``[R]``; None where all are served."""
    idle = torch.where(slots < 0, -1, 0)
    if lacking is not None:
        idle = torch.where((slots >= 0) & (lacking != 0), int(RowStatus.NOT_COVERED), idle)
    return idle.to(torch.int32)


def lacks_service(table: SlotTable, slots: Tensor) -> Tensor:
    """Whether a request needs what the step does not serve, bool ``[N]``; of padding, whether slot 0 does."""
    # Not as in idle_status: with an index clamped at both ends a record of drafts is three kernels, not two.
    return (table.needs[slots.clamp(min=0)] & table.unserved) != 0


def covered_slots(slots: Tensor, status: Tensor) -> Tensor:
    """The slots ``[N]``, -1 where the status is ``NOT_COVERED``: such a request leaves no trace."""
    return torch.where(status == int(RowStatus.NOT_COVERED), -1, slots)


def take(values: Any, index: Tensor | tuple[Tensor, ...]) -> Any:
    """Entries ``index`` of every tensor inside nested tuples, such as rows ``[R, ...]``; None stays None."""
    if isinstance(values, Tensor):
        return values[index]
    if isinstance(values, tuple):
        return type(values)(*(take(value, index) for value in values))
    return values


def expand_to(per_row: Tensor, like: Tensor) -> Tensor:
    """``per_row`` ``[R, ...]`` viewed as ``[R, ..., 1, ...]``, with as many dimensions as ``like``."""
    return per_row.view(*per_row.shape, *(1,) * (like.dim() - per_row.dim()))
