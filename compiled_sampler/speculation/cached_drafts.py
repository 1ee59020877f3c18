"""Rows of a draft table: which of them a step of drafts writes, and which of them drafts are judged by.

Draft j of slot s stands in row ``s * K + j`` of the table, where a verification reads it in place: what was drawn from
is neither stacked nor brought into the order of the requests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import DraftTable
from compiled_sampler.passes.blocks import all_rows
from compiled_sampler.speculation.row_layout import first_rows, request_of_draft


class CachedRows(NamedTuple):
    """The logits that drafts were drawn from, where they stand in a draft table."""

    table: DraftTable
    """``[S + 1, K, V]``."""
    row_ids: Tensor
    """int64 ``[D]``, the row of each draft in the table, in the order of the requests."""


def rows_of_places(slots: Tensor, places: Tensor, table: DraftTable) -> Tensor:
    """The rows of a draft table, int64 ``[n]``, that hold the drafts at these places; padding has the last slot's.

    Args:
        slots: int64 ``[n]``; -1 for padding.
        places: int64 ``[n]``, in ``[0, K)``, how many drafts of the same block come before.
        table: ``[S + 1, K, V]``.
    """
    count, width, _ = table.logits.shape
    return torch.where(slots < 0, count - 1, slots) * width + places


def rows_of_drafts(
    logits: Tensor, slots: Tensor, num_drafts: Tensor, table: DraftTable, *, searched: bool = False
) -> tuple[Tensor, Tensor]:
    """The slot, and the row of a draft table, of each draft in the order of the requests: int64 ``[R]`` each.

    Args:
        logits: ``[R, >=V]``, the target's; only R is used, which is more than there are drafts.
        slots: int64 ``[N]``; -1 for padding.
        num_drafts: int64 ``[N]``, 0..K; -1 for padding without rows.
        table: ``[S + 1, K, V]``.
        searched: as for ``row_layout``.

    Returns:
        Slots, -1 for padding and behind the last draft; and rows of the table, there those of padding.
    """
    first_drafts = first_rows(num_drafts.clamp(min=0), searched=searched)
    draft = torch.arange(logits.shape[0], device=logits.device)
    request = request_of_draft(first_drafts, num_drafts, draft, searched=searched)
    owner = request.clamp(max=slots.shape[0] - 1)
    slot = torch.where(request < slots.shape[0], slots[owner], -1)
    places = (draft - first_drafts[owner]).clamp(0, table.logits.shape[1] - 1)
    return slot, rows_of_places(slot, places, table)


def gathered(values: Tensor | DraftTable, row_ids: Tensor) -> Tensor:
    """A copy of rows of a tensor or a draft table, ``[n, >=V]``, for passes that read all rows of a tensor."""
    return all_rows(values)[row_ids]
