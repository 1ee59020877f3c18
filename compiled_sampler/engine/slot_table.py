"""The parameters of every slot on the device, and those that are yet to be written there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.batch import SlotTable

_DTYPES = (torch.int64, torch.float32, torch.int32, torch.int64, torch.float64, torch.float32)
_ALIGNED = 16  # words; each column starts aligned
_WORD = torch.int32  # every column is copied as words of this type, so that one launch copies them all


class StagedTable:
    """A slot table whose entries are written on the host and uploaded together: a copy and a launch for any number.

    Torch's allocator keeps the pinned memory of an upload until the device has read it.

    Args:
        num_slots: S.
        entry: of a free slot, a number for each column of ``SlotTable``.
        device: of the table.
    """

    def __init__(self, num_slots: int, entry: Sequence[float | int], device: torch.device) -> None:
        """Fill all slots."""
        sizes = [num_slots * dtype.itemsize // _WORD.itemsize for dtype in _DTYPES]
        room = [math.ceil(size / _ALIGNED) * _ALIGNED for size in sizes]
        self._is_pinned = device.type == "cuda"
        self.is_pending = False
        with torch.inference_mode(False):  # a tensor made under inference mode could not be written outside of it
            self._host = torch.zeros(sum(room), dtype=_WORD, device="cpu")
            columns = [part.view(dtype) for part, dtype in zip(_parts(self._host, room, sizes), _DTYPES, strict=True)]
            for column, value in zip(columns, entry, strict=True):
                column.fill_(value)
            self._staging = self._host.to(device, copy=True)
            self._staged = _parts(self._staging, room, sizes)
            self.table = SlotTable(*(column.to(device, copy=True) for column in columns))
            self._words = [column.view(_WORD) for column in self.table]
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
        source = torch.empty_like(self._host, pin_memory=True).copy_(self._host) if self._is_pinned else self._host
        self._staging.copy_(source, non_blocking=True)
        torch._foreach_copy_(self._words, self._staged)
        self.is_pending = False  # only now: where the device fails, a later upload tries again


def _parts(words: Tensor, room: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    """The first ``sizes`` words of each part of ``room`` words."""
    return [part[:size] for part, size in zip(torch.split(words, list(room)), sizes, strict=True)]
