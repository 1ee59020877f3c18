"""The effects among the stages: edits of a few tokens of each row, in the logits, and drawn tokens, in the history.

They get the memory that they write more than once. Logits come as floats, to read, and as the integers of their bits,
to which edits add; the history comes to read, and once to write for each kind of number. An edit is one kernel then,
which reads and writes a token in one thread, and so is the record of a token a row. Were memory given once, Inductor
would write what is added to other memory first, and add it in a second kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.batch import AnyTable
from compiled_sampler.core.rows import covered_slots, idle_status
from compiled_sampler.edit_tables import BiasLists, History, HistoryRows, Penalties, StopLists
from compiled_sampler.edits.bias import biased_tokens
from compiled_sampler.edits.changes import EditedTokens
from compiled_sampler.edits.penalties import penalized_tokens
from compiled_sampler.edits.recording import DrawEnds, Record, recorded_drafts, recorded_draws, recorded_ends


def write_biases(
    x: Tensor, bits: Tensor, slots: Tensor, lists: BiasLists, *, vocab_size: int, tells: bool = False
) -> EditedTokens | None:
    """What ``take_back`` undoes, None if it is not asked for; biases are in the logits afterwards.

    Args:
        x: float32 ``[R, V]``.
        bits: int32 ``[R, V]``, the memory of ``x``.
        slots: int64 ``[R]``; -1 for padding.
        lists: by slot.
        vocab_size: V.
        tells: whether it is asked for.
    """
    return _write(bits, biased_tokens(x, slots, lists, vocab_size=vocab_size), tells)


def write_penalties(
    x: Tensor,
    bits: Tensor,
    slots: Tensor,
    positions: Tensor,
    penalties: Penalties,
    history: History,
    *,
    vocab_size: int,
    tells: bool = False,
) -> EditedTokens | None:
    """What ``take_back`` undoes, None if it is not asked for; penalties are in the logits afterwards.

    Args:
        x: float32 ``[R, V]``.
        bits: int32 ``[R, V]``, the memory of ``x``.
        slots: int64 ``[R]``; -1 for padding.
        positions: int64 ``[R]``, of the token to draw.
        penalties: by slot.
        history: by slot.
        vocab_size: V.
        tells: whether it is asked for.
    """
    return _write(bits, penalized_tokens(x, slots, positions, penalties, history, vocab_size=vocab_size), tells)


def take_back(bits: Tensor, made: EditedTokens) -> None:
    """Nothing; logits have the bits again that they had before an edit, if later ones were taken back already.

    Args:
        bits: int32 ``[R, V]``, of logits.
        made: what the edit added, with token ids in int32.
    """
    _write(bits, EditedTokens(made.token_ids.to(torch.int64), -made.added), tells=False)


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
    table: AnyTable,
    *,
    vocab_size: int,
) -> None:
    """Nothing; ``recorded_drafts`` of covered requests are in the history afterwards; arguments as there and above.

    ``table``: parameters by slot.
    """
    slots, drafts = covered_slots(slots, idle_status(table, slots)), (draft_token_ids, num_drafts)
    write_record(rows, recorded_drafts(slots, positions, *drafts, history, vocab_size=vocab_size))


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


def _write(bits: Tensor, made: EditedTokens, tells: bool) -> EditedTokens | None:
    rows = torch.arange(bits.shape[0], device=bits.device)[:, None]
    told = EditedTokens(made.token_ids.to(torch.int32), made.added) if tells else None  # where memory may end
    bits.index_put_((rows, made.token_ids), made.added, accumulate=True)
    return told
