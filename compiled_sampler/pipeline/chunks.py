"""Rows in chunks: the one place where a step of many rows is cut, so that its scratch stays bounded.

A row is a pure function of itself, so chunks change no bit. Each chunk's scratch is free before the next one needs it,
also inside of a capture, where the memory of a graph's pool is used again in the order of its stream.

A stage in eager torch writes to memory what kernels keep in registers, so it takes chunks of its own. Stages that hold
far more than they read and return say so where they are defined (``core.stage.holds``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import DraftTable, PickedRows, RowEntries, SlotTable
from compiled_sampler.core.stage import Run, scratch_of
from compiled_sampler.edits.changes import EditedTokens
from compiled_sampler.edits.history import History, RowHistory
from compiled_sampler.edits.tables import TABLES, CustomTables, EditTables
from compiled_sampler.exact.row_race import IN_TORCH, NO_WINNER, race_and_weigh, race_rows
from compiled_sampler.exact.triton import num_parts
from compiled_sampler.logit_edit import CustomEdits
from compiled_sampler.passes.candidates import child_tokens
from compiled_sampler.passes.law import unfiltered_weights
from compiled_sampler.pipeline.schedule import StepRun, chunk_ends, eager_rows

Result = TypeVar("Result")
Stage = Callable[..., Any]

_BY_SLOT = (SlotTable, RowEntries, DraftTable, EditTables, CustomTables, *TABLES, CustomEdits, bool, str)
"""What has no rows; any other tensor is taken to have a row for each of the batch, cut into chunks and padded."""


def in_chunks(run: StepRun, step: Callable[..., Result], *rows: Any) -> Result:
    """``step(*rows)``, for no more rows at once than the schedule allows for a chain of stages."""
    # step: from rows [R, ...] to rows [R, ...], each a function of its own row alone.
    return in_chunks_of(run.schedule.chunk_rows if run.fuses else run.schedule.eager_chunk_rows, step, *rows)


def in_chunks_as(stage: Stage, run: Run, step: Callable[..., Any], *tensors: Any) -> Any:
    """``step(*tensors)``, which runs the stage and reads its results: in eager torch for as many rows at once."""
    most = None if run.fuses else _most_rows(stage, tensors, {})
    return step(*tensors) if most is None else in_chunks_of(most, step, *tensors)


def _eagerly(stage: Stage, /, *tensors: Any, **static: Any) -> Any:
    most = _most_rows(stage, tensors, static)
    if most is None:
        return stage(*tensors, **static)
    scratch = scratch_of(stage)
    whole = 0 if scratch is None else scratch.whole
    if stage is unfiltered_weights:
        whole = int(tensors[1] is not None)  # row_ids, which name rows of the logits
    return in_chunks_of(most, lambda *rows: stage(*tensors[:whole], *rows, **static), *tensors[whole:])


def _without_kernels(stage: Stage, /, *tensors: Any, **static: Any) -> Any:
    results = _eagerly(IN_TORCH.get(stage, stage), *tensors, **static)
    # Stages that read winners and masses are compiled for as many parts of a row as kernels make.
    if stage is race_rows:
        return _in_parts(results, NO_WINNER, static["vocab_size"], weighs=False)
    if stage is race_and_weigh:
        pairs = zip(results, (0, NO_WINNER), strict=True)
        return tuple(_in_parts(each, value, static["vocab_size"], weighs=True) for each, value in pairs)
    return results


eagerly = Run(_eagerly)
"""Each stage in eager torch, on no more rows at once than its scratch has room for."""
without_kernels = Run(_without_kernels)
"""``eagerly``, with torch in the place of hand-written kernels."""


def _in_parts(of_rows: Tensor, value: int, vocab_size: int, *, weighs: bool) -> Tensor:
    """Numbers ``[R, parts]``: the first part of a row has its number ``[R, 1]``, the others a value."""
    parts = num_parts(vocab_size, of_rows.shape[0], weighs=weighs)
    return F.pad(of_rows, (0, parts - 1), value=value)


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


def _most_rows(stage: Stage, tensors: tuple[Any, ...], static: dict[str, Any]) -> int | None:
    """Rows that a stage has room for at once; None where it takes all."""
    if stage is child_tokens:  # as many as the parents have
        return eager_rows(tokens=tensors[1].shape[1] * static["ratio"] * static["size"])
    scratch = scratch_of(stage)
    if scratch is None:
        return None
    if scratch.tokens:
        return eager_rows(tokens=static["vocab_size"])
    if scratch.blocks:
        return eager_rows(tokens=scratch.blocks * static["block"])
    length = sum(map(_positions, tensors))
    drafts = (leaf for leaf in leaves_by_row(tensors) if leaf.dtype is torch.int64 and leaf.dim() == 2)
    num_drafts = max((leaf.shape[1] for leaf in drafts), default=0)
    return eager_rows(row_bytes=scratch.position_bytes * length * (1 + num_drafts))


def _positions(read: Any) -> int:
    """The positions of a history, or of what was edited for each; 0 of anything else."""
    if isinstance(read, EditedTokens):
        return read.token_ids.shape[1]
    return read.entries.shape[2] if isinstance(read, History | RowHistory) else 0


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
