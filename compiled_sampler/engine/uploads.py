"""What goes from the host to the device, in one upload each: the parameters of all slots, the numbers of a plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.batch import SlotTable

_DTYPES = (torch.int64, torch.float32, torch.int32, torch.int64, torch.float64, torch.float32)
_ALIGNED = 16  # words; each column and each array starts aligned, since kernels clone what is not
_WORD = torch.int32  # all columns lie in one tensor of these words, so that one copy brings them all


class StagedTable:
    """A slot table whose entries are written on the host and uploaded together: one copy for any number.

    Args:
        num_slots: S.
        entry: of a free slot, a number for each column of ``SlotTable``.
        device: of the table.
    """

    def __init__(self, num_slots: int, entry: Sequence[float | int], device: torch.device) -> None:
        """Fill all slots."""
        sizes = [num_slots * dtype.itemsize // _WORD.itemsize for dtype in _DTYPES]
        room = [math.ceil(size / _ALIGNED) * _ALIGNED for size in sizes]
        self._device = device
        self.is_pending = False
        with torch.inference_mode(False):  # a tensor made under inference mode could not be written outside of it
            self._host = torch.zeros(sum(room), dtype=_WORD, device="cpu")
            columns = [part.view(dtype) for part, dtype in zip(_parts(self._host, room, sizes), _DTYPES, strict=True)]
            for column, value in zip(columns, entry, strict=True):
                column.fill_(value)
            self._there = self._host.to(device, copy=True)
            starts = [0, *itertools.accumulate(room)]
            places = zip(_DTYPES, starts, strict=False)
            self.table = SlotTable(*(_column(self._there, dtype, start, num_slots) for dtype, start in places))
        self._columns: list[Any] = [column.numpy() for column in columns]

    def write(self, slot: int, entry: Sequence[float | int]) -> None:
        """Write an entry on the host; ``upload`` brings it to the device."""
        for column, value in zip(self._columns, entry, strict=True):
            column[slot] = value
        self.is_pending = True

    def upload(self) -> None:
        """Bring all entries to the device, on the current stream and without a wait, if any is pending."""
        if not self.is_pending:
            return
        self._there.copy_(_readable(self._host, self._device), non_blocking=True)
        self.is_pending = False  # only now: where the device fails, a later upload tries again


def uploaded(arrays: Sequence[np.ndarray | None], device: torch.device) -> list[Tensor | None]:
    """Arrays of int64 on the device, in one upload and without a wait; None stays None.

    On a CPU a single array shares its memory with the result.

    Args:
        arrays: of one dimension.
        device: where they go.
    """
    given = [each for each in arrays if each is not None]
    parts = iter([_sent(given[0], device)] if len(given) == 1 else _sent_together(given, device))
    return [None if each is None else next(parts) for each in arrays]


def _sent_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    aligned = _ALIGNED * _WORD.itemsize // 8
    starts = [0, *itertools.accumulate(math.ceil(len(each) / aligned) * aligned for each in arrays)]
    places = [slice(start, start + len(each)) for start, each in zip(starts[:-1], arrays, strict=True)]
    joined = np.zeros(starts[-1], np.int64)
    for place, each in zip(places, arrays, strict=True):
        joined[place] = each
    there = _sent(joined, device)
    return [there[place] for place in places]


def _sent(numbers: np.ndarray, device: torch.device) -> Tensor:
    return _readable(torch.from_numpy(numbers), device).to(device, non_blocking=True)


def _readable(host: Tensor, device: torch.device) -> Tensor:
    """A tensor where the device reads it without a wait: for CUDA in pinned memory, which torch keeps until then."""
    return torch.empty_like(host, pin_memory=True).copy_(host) if device.type == "cuda" else host


def _parts(words: Tensor, room: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    """The first ``sizes`` words of each part of ``room`` words."""
    return [part[:size] for part, size in zip(torch.split(words, list(room)), sizes, strict=True)]


def _column(words: Tensor, dtype: torch.dtype, start: int, size: int) -> Tensor:
    """``size`` numbers that begin at a word, no view: compilers follow a view to its base, which has another dtype."""
    column = torch.empty(0, dtype=dtype, device=words.device)
    return column.set_(words.untyped_storage(), start * _WORD.itemsize // dtype.itemsize, (size,), (1,))
