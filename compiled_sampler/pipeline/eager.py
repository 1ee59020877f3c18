"""Stages in eager torch, which writes to memory what kernels keep in registers: in chunks of rows, with the same bits.

Stages that hold far more than they read and return say so where they are defined (``core.stage.holds``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.core.stage import Run, fuses, scratch_of
from compiled_sampler.edits.changes import EditedTokens
from compiled_sampler.edits.history import History, RowHistory
from compiled_sampler.exact.row_race import IN_TORCH, NO_WINNER, race_and_weigh, race_rows
from compiled_sampler.exact.triton import num_parts
from compiled_sampler.passes.candidates import child_tokens
from compiled_sampler.passes.law import unfiltered_weights
from compiled_sampler.pipeline.chunks import in_chunks_of, leaves_by_row
from compiled_sampler.pipeline.schedule import eager_rows

Stage = Callable[..., Any]


def eagerly(stage: Stage, /, *tensors: Any, **static: Any) -> Any:
    """The results of a stage, a ``run`` for the pipeline: for no more rows at once than its scratch has room for."""
    most = _most_rows(stage, tensors, static)
    if most is None:
        return stage(*tensors, **static)
    scratch = scratch_of(stage)
    whole = 0 if scratch is None else scratch.whole
    if stage is unfiltered_weights:
        whole = int(tensors[1] is not None)  # row_ids, which name rows of the logits
    return in_chunks_of(most, lambda *rows: stage(*tensors[:whole], *rows, **static), *tensors[whole:])


def without_kernels(stage: Stage, /, *tensors: Any, **static: Any) -> Any:
    """``eagerly``, with torch in the place of hand-written kernels."""
    results = eagerly(IN_TORCH.get(stage, stage), *tensors, **static)
    # Stages that read winners and masses are compiled for as many parts of a row as kernels make.
    if stage is race_rows:
        return _in_parts(results, NO_WINNER, static["vocab_size"], weighs=False)
    if stage is race_and_weigh:
        pairs = zip(results, (0, NO_WINNER), strict=True)
        return tuple(_in_parts(each, value, static["vocab_size"], weighs=True) for each, value in pairs)
    return results


def _in_parts(of_rows: Tensor, value: int, vocab_size: int, *, weighs: bool) -> Tensor:
    """Numbers ``[R, parts]``: the first part of a row has its number ``[R, 1]``, the others a value."""
    parts = num_parts(vocab_size, of_rows.shape[0], weighs=weighs)
    return F.pad(of_rows, (0, parts - 1), value=value)


def in_chunks_as(stage: Stage, run: Run, step: Callable[..., Any], *tensors: Any) -> Any:
    """``step(*tensors)``, which runs the stage and reads its results: in eager torch for as many rows at once."""
    most = None if fuses(run) else _most_rows(stage, tensors, {})
    return step(*tensors) if most is None else in_chunks_of(most, step, *tensors)


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
