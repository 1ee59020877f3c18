"""Rows in chunks: the one place where a step of many rows is cut, so that its scratch stays bounded.

A row is a pure function of itself, so chunks change no bit. Each chunk's scratch is free before the next one needs it,
also inside of a capture, where the memory of a graph's pool is used again in the order of its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from compiled_sampler.batch import RowEntries, SlotTable
from compiled_sampler.core.stage import Run, fuses
from compiled_sampler.edits.tables import TABLES, EditTables
from compiled_sampler.logit_edit import CustomEdits
from compiled_sampler.pipeline.schedule import Schedule, chunk_ends, history_rows

Result = TypeVar("Result")

_BY_SLOT = (SlotTable, RowEntries, EditTables, *TABLES, CustomEdits, bool, str)  # what has no rows


def in_chunks(schedule: Schedule, run: Run, step: Callable[..., Result], *rows: Any) -> Result:
    """``step(*rows)``, for no more rows at once than the schedule allows for a chain of stages."""
    # step: from rows [R, ...] to rows [R, ...], each a function of its own row alone.
    return _in_chunks(schedule.chunk_rows if fuses(run) else schedule.eager_chunk_rows, step, *rows)


def in_eager_chunks(schedule: Schedule, run: Run, step: Callable[..., Result], *rows: Any) -> Result:
    """``in_chunks`` for a single stage, which has scratch in eager torch alone; arguments as there."""
    return step(*rows) if fuses(run) else _in_chunks(schedule.eager_chunk_rows, step, *rows)


def in_history_chunks(run: Run, position_bytes: int, length: int, step: Callable[..., Result], *rows: Any) -> Result:
    """``in_eager_chunks`` for a stage that holds so many bytes for each of the ``length`` positions of a row."""
    return step(*rows) if fuses(run) else _in_chunks(history_rows(position_bytes * length), step, *rows)


def in_chunks_to(ends: Sequence[int], step: Callable[..., Result], *rows: Any) -> Result:
    """``step(*rows)`` for the rows up to each of the ends, one chunk after the other; arguments as ``in_chunks``."""
    if len(ends) == 1:
        return step(*rows)
    results: Any = None
    first = 0
    for end in ends:
        part = step(*part_of(rows, first, end))
        results = _room(part, ends[-1]) if results is None else results
        _write(results, part, first, end)
        first = end
    result: Result = results
    return result


def _in_chunks(most: int, step: Callable[..., Result], *rows: Any) -> Result:
    num_rows = _num_rows(rows)
    return step(*rows) if num_rows <= most else in_chunks_to(chunk_ends(num_rows, most), step, *rows)


def _num_rows(rows: Any) -> int:
    """R, of the first tensor."""
    while not isinstance(rows, Tensor):
        rows = next(item for item in rows if item is not None and not isinstance(item, _BY_SLOT))
    return rows.shape[0]


def part_of(rows: Any, first: int, end: int) -> Any:
    """Views of the rows of a chunk."""
    if isinstance(rows, Tensor):
        return rows[first:end]
    if rows is None or isinstance(rows, _BY_SLOT):
        return rows
    return _same_type(rows, [part_of(item, first, end) for item in rows])


def _room(part: Any, num_rows: int) -> Any:
    """Uninitialised memory for the results of all rows, like those of a chunk."""
    if isinstance(part, Tensor):
        return part.new_empty((num_rows, *part.shape[1:]))
    if part is None or isinstance(part, _BY_SLOT):
        return part
    return _same_type(part, [_room(item, num_rows) for item in part])


def _write(results: Any, part: Any, first: int, end: int) -> None:
    """Copy a chunk's results to their place, which holds one chunk twice at most; ``torch.cat`` would hold all."""
    if isinstance(results, Tensor):
        results[first:end].copy_(part)
    elif results is not None and not isinstance(results, _BY_SLOT):
        for result, piece in zip(results, part, strict=True):
            _write(result, piece, first, end)


def _same_type(like: Any, items: list[Any]) -> Any:
    """A tuple, or a named tuple of the type of ``like``."""
    return type(like)(*items) if hasattr(like, "_fields") else tuple(items)
