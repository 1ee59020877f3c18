"""Edits of a few tokens of every row: each list is written into the logits, and undone if these are to be restored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import Run
from compiled_sampler.edit_tables import EditTables
from compiled_sampler.edits.changes import take_back


def has_lists(tables: EditTables) -> bool:
    """Whether an edit writes a few tokens of each row."""
    return bool(tables.lists)


def write_lists(x: Tensor, row_slots: RowSlots, tables: EditTables, run: Run, undo: ExitStack | None = None) -> None:
    """Nothing; the lists are in the logits afterwards.

    Args:
        x: float32 ``[R, V]``.
        row_slots: ``[R]``, the request and the position of each row.
        tables: by slot.
        run: how a stage is run.
        undo: takes a call for each list that gives the logits their bits back, the last list first; None for none.
    """
    writer = _Writer(x, run, undo)
    for table in tables.lists:
        table.write(writer, row_slots.slots, row_slots.positions, tables.history)


class _Writer:
    """Writes one list after the other into logits, float32 ``[R, V]``; arguments as in ``write_lists``."""

    def __init__(self, x: Tensor, run: Run, undo: ExitStack | None) -> None:
        self._x, self._bits, self._run, self._undo = x, x.view(torch.int32), run, undo

    def add(self, stage: Callable[..., Any], *read: Any) -> None:
        """Run a stage that adds to the bits of logits."""
        static = {"vocab_size": self._x.shape[1], "tells": self._undo is not None}
        made = self._run(stage, self._x, self._bits, *read, **static)
        if self._undo is not None:
            self._undo.callback(self._run, take_back, self._bits, made)

    def put(self, stage: Callable[..., Any], *read: Any, smallest: bool = False) -> None:
        """Write values of tokens ``[R, n]``, of a token that comes again the smallest one or the same each time."""
        token_ids, values = self._run(stage, self._x, *read)
        if self._undo is not None:
            self._undo.callback(self._x.scatter_, 1, token_ids, self._x.gather(1, token_ids))
        if smallest:
            self._x.scatter_reduce_(1, token_ids, values, "amin")
        else:
            self._x.scatter_(1, token_ids, values)
