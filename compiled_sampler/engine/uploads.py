"""What goes from the host to the device, in one upload each: the parameters of all slots, the numbers of a plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.batch import SlotTable

_DTYPES = (torch.int64, torch.float32, torch.int32, torch.int64, torch.float64, torch.float32)
_ALIGNED = 16  # words; each column and each array starts aligned, since kernels clone what is not
_PINNED: dict[str, Any] = {"device": "cpu", "pin_memory": True}
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


class PlannedTensors:
    """The numbers of a plan: on the host, and from their first use on also on the device.

    Args:
        arrays: int64 ``[N]``, of one length, by the name of the input that they are of a step. On a CPU the tensors
            share their memory.
        device: where they go.

    Attributes:
        host: the same as tensors that a device reads without a wait; for CUDA in pinned memory.
    """

    def __init__(self, arrays: dict[str, np.ndarray], device: torch.device) -> None:
        """Upload nothing."""
        self._device = device
        self._words: Tensor | None = None
        self._there: dict[str, Tensor] | None = None
        if device.type == "cpu":
            self.host = self._there = {name: torch.from_numpy(each) for name, each in arrays.items()}
            return
        self._words = torch.empty(len(arrays), _padded(len(next(iter(arrays.values())))), dtype=torch.int64, **_PINNED)
        self.host = self._parts(self._words, arrays)
        for name, each in arrays.items():
            self.host[name].numpy()[:] = each

    @property
    def there(self) -> dict[str, Tensor]:
        """The tensors on the device, uploaded together and without a wait by the first that asks.

        A capture that is the first to ask takes the upload into its graph, whose memory nobody else may read.
        """
        if self._there is not None:
            return self._there
        assert self._words is not None
        there = self._parts(self._words.to(self._device, non_blocking=True), self.host)
        if not torch.cuda.is_current_stream_capturing():
            self._there = there
        return there

    @property
    def uploaded(self) -> tuple[Tensor, ...]:
        """The tensors on the device; none before the first use."""
        return tuple((self._there or {}).values())

    def holds(self, name: str, tensor: object) -> bool:
        """Whether a tensor is the one of a name on the device."""
        return self._there is not None and self._there.get(name) is tensor

    @staticmethod
    def _parts(words: Tensor, arrays: Mapping[str, Sized]) -> dict[str, Tensor]:
        return {name: row[: len(each)] for row, (name, each) in zip(words, arrays.items(), strict=True)}


def uploaded(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Numbers on the device, without a wait; on a CPU they share their memory."""
    return _readable(torch.from_numpy(numbers), device).to(device, non_blocking=True)


def _padded(size: int) -> int:
    """The smallest size of at least ``size`` after which another array of int64 starts aligned."""
    aligned = _ALIGNED * _WORD.itemsize // 8
    return math.ceil(size / aligned) * aligned


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
