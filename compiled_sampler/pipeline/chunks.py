"""Rows in chunks: the one place where a step of many rows is cut, so that its scratch stays bounded.

A row is a pure function of itself, so chunks change no bit. Each chunk's scratch is free before the next one needs it,
also inside of a capture, where the memory of a graph's pool is used again in the order of its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from compiled_sampler.batch import DraftTable, PickedRows, RowEntries, SlotTable
from compiled_sampler.core.stage import Run, fuses
from compiled_sampler.edits.tables import TABLES, CustomTables, EditTables
from compiled_sampler.logit_edit import CustomEdits
from compiled_sampler.pipeline.schedule import Schedule, chunk_ends

Result = TypeVar("Result")

_BY_SLOT = (SlotTable, RowEntries, DraftTable, EditTables, CustomTables, *TABLES, CustomEdits, bool, str)
"""What has no rows; any other tensor is taken to have a row for each of the batch, cut into chunks and padded."""


def in_chunks(schedule: Schedule, run: Run, step: Callable[..., Result], *rows: Any) -> Result:
    """``step(*rows)``, for no more rows at once than the schedule allows for a chain of stages."""
    # step: from rows [R, ...] to rows [R, ...], each a function of its own row alone.
    return in_chunks_of(schedule.chunk_rows if fuses(run) else schedule.eager_chunk_rows, step, *rows)


def in_chunks_of(most: int, step: Callable[..., Result], *rows: Any) -> Result:
    """``step(*rows)``, for ``most`` rows at once; arguments as ``in_chunks``."""
    num_rows = next(leaves_by_row(rows)).shape[0]
    return step(*rows) if num_rows <= most else in_chunks_to(chunk_ends(num_rows, most), step, *rows)


def in_chunks_to(ends: Sequence[int], step: Callable[..., Result], *rows: Any) -> Result:
    """``step(*rows)`` for the rows up to each of the ends, one chunk after the other; arguments as ``in_chunks``."""
    if len(ends) == 1:
        return step(*rows)
    results: Any = None
    first = 0
    for end in ends:
        part = step(*part_of(rows, first, end))
        if results is None:
            results = map_rows(lambda leaf: leaf.new_empty((ends[-1], *leaf.shape[1:])), part)
        _write(results, part, first, end)
        first = end
    result: Result = results
    return result


def leaves_by_row(rows: Any) -> Iterator[Tensor]:
    """The tensors ``[R, ...]``, in their order."""
    if isinstance(rows, Tensor):
        yield rows
    elif isinstance(rows, PickedRows):
        yield rows.row_ids
    elif rows is not None and not isinstance(rows, _BY_SLOT):
        for item in rows:
            yield from leaves_by_row(item)


def part_of(rows: Any, first: int, end: int) -> Any:
    """Views of the rows of a chunk."""
    return map_rows(lambda leaf: leaf[first:end], rows)


def map_rows(function: Callable[[Tensor], Tensor], rows: Any) -> Any:
    """The rows with a function of each of ``leaves_by_row`` in its place."""
    if isinstance(rows, Tensor):
        return function(rows)
    if isinstance(rows, PickedRows):
        return rows._replace(row_ids=function(rows.row_ids))
    if rows is None or isinstance(rows, _BY_SLOT):
        return rows
    items = [map_rows(function, item) for item in rows]
    return type(rows)(*items) if hasattr(rows, "_fields") else tuple(items)


def _write(results: Any, part: Any, first: int, end: int) -> None:
    """Copy a chunk's results to their place, which holds one chunk twice at most; ``torch.cat`` would hold all."""
    if isinstance(results, Tensor):
        results[first:end].copy_(part)
    elif results is not None and not isinstance(results, _BY_SLOT):
        for result, piece in zip(results, part, strict=True):
            _write(result, piece, first, end)
