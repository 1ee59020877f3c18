"""Where the edits of a request stand in its row of an int32 matrix, so that one copy brings all of them to a device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from compiled_sampler.edits import EDIT_SPECS
from compiled_sampler.edits.edit_spec import Column, EditSizes, SlotRow
from compiled_sampler.params import SamplingParams

_ALIGNED = 16  # words; kernels clone what is not aligned
_DTYPES = {torch.int32: np.int32, torch.float32: np.float32, torch.float64: np.float64}


def checked_sizes(sizes: EditSizes | None) -> EditSizes:
    """The sizes that a caller gave, or the default."""
    if sizes is not None and not isinstance(sizes, EditSizes):
        raise TypeError(f"edit_sizes must be EditSizes, got {type(sizes).__name__}; EditSizes(biases=...)")
    return sizes or EditSizes()


def check_fits(params: SamplingParams, sizes: EditSizes, vocab_size: int) -> None:
    """Raise unless the edits of a request have room in a row, and ask nothing of ids that the vocabulary lacks."""
    for spec in EDIT_SPECS:
        if spec.wanted(params):
            spec.check_fits(params, sizes, vocab_size)


class RowLayout:
    """The columns of a slot's row: first single numbers, the smaller before the larger, then lists, each aligned."""

    def __init__(self, sizes: EditSizes, vocab_size: int) -> None:
        self._sizes, self._vocab_size = sizes, vocab_size
        columns = list(dict.fromkeys(column for spec in EDIT_SPECS for column in spec.columns.values()))
        self.shapes = {column: column.shape(sizes, vocab_size) for column in columns}
        self.starts, end = dict[Column, int](), 0
        for column in sorted(columns, key=lambda column: (self.shapes[column] != (), column.dtype.itemsize)):
            words = column.dtype.itemsize // torch.int32.itemsize
            aligned = _ALIGNED if self.shapes[column] else words
            start = -(-end // aligned) * aligned
            self.starts[column], end = start, start + words * math.prod(self.shapes[column])
        self.num_words = -(-end // _ALIGNED) * _ALIGNED
        self._without_edits = np.zeros(self.num_words, np.int32)
        for column in columns:
            self._part(self._without_edits, column)[...] = column.off or 0
        self._of_every = [column for column in columns if column.off is None]

    def row_of(self, params: SamplingParams, edits: Sequence[str], prompt_len: int, reads_history: bool) -> np.ndarray:
        """The row of a request with these edits, int32 ``[num_words]``; ``check_fits`` has looked at it."""
        row = self._without_edits.copy()
        slot_row = SlotRow(prompt_len, reads_history, self._sizes, self._vocab_size)
        used = (column for spec in EDIT_SPECS if spec.name in edits for column in spec.columns.values())
        for column in dict.fromkeys((*self._of_every, *used)):
            value, part = column.value(params, slot_row), self._part(row, column)
            if self.shapes[column]:
                values = np.asarray(value)
                part[tuple(map(slice, values.shape))] = values
            else:
                part[...] = value
        return row

    def _part(self, row: np.ndarray, column: Column) -> np.ndarray:
        """The numbers of a column in a row, which share its memory."""
        shape, words = self.shapes[column], column.dtype.itemsize // torch.int32.itemsize
        start = self.starts[column]
        return row[start : start + words * math.prod(shape)].view(_DTYPES[column.dtype]).reshape(shape)
