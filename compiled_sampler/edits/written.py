"""Stages that write drawn tokens into the history.

They get its memory to read, and once to write for each kind of number, so that the record of a token a row is one
kernel; ``changes.py`` says why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.batch import SlotTable
from compiled_sampler.core.rows import lacks_service
from compiled_sampler.edits.history import History, HistoryRows
from compiled_sampler.edits.min_tokens import StopLists
from compiled_sampler.edits.recording import DrawEnds, Record, recorded_drafts, recorded_draws, recorded_ends


def record_draws(
    history: History,
    rows: HistoryRows,
    slots: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    status: Tensor,
    stops: StopLists,
    *,
    num_places: int = 0,
) -> DrawEnds:
    """The ends of ``recorded_draws``; its record is in the history afterwards.

    Args:
        history: by slot.
        rows: the same memory.
        slots: as in ``recorded_draws``, like the others.
        positions: int64 ``[R]``.
        token_ids: int64 ``[R]``.
        status: int32 ``[R]``.
        stops: by slot.
        num_places: as in ``recorded_draws``.
    """
    record, ends = recorded_draws(slots, positions, token_ids, status, stops, history, num_places=num_places)
    write_record(rows, record)
    return ends


def record_drafts(
    history: History,
    rows: HistoryRows,
    slots: Tensor,
    positions: Tensor,
    draft_token_ids: Tensor,
    num_drafts: Tensor,
    table: SlotTable,
    *,
    vocab_size: int,
) -> None:
    """Nothing; ``recorded_drafts`` of covered requests are in the history afterwards; arguments as there and above.

    ``table``: parameters by slot.
    """
    covered = torch.where(lacks_service(table, slots), -1, slots)
    drafts = draft_token_ids, num_drafts
    write_record(rows, recorded_drafts(covered, positions, *drafts, history, vocab_size=vocab_size))


def record_ends(
    history: History,
    rows: HistoryRows,
    slots: Tensor,
    positions: Tensor,
    emitted: Tensor,
    num_drafts: Tensor,
    status: Tensor,
) -> Tensor:
    """The status of ``recorded_ends``, int32 ``[N]``; its record is in the history afterwards; arguments as above."""
    record, status = recorded_ends(slots, positions, emitted, num_drafts, status, history)
    write_record(rows, record)
    return status


def write_record(rows: HistoryRows, record: Record) -> None:
    """Nothing; a record is in the history afterwards, which the rows are."""
    for row, numbers in zip(rows, record, strict=True):
        row.index_put_((torch.zeros_like(numbers.places), numbers.places), numbers.values)
