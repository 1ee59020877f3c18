"""What goes from the host to the device: the parameters of all slots, and the numbers of a plan."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.batch import SlotTable
from compiled_sampler.engine.boundary.capture import is_capturing
from graph_cache import HostTable, tensor_of

_OF_REQUESTS = torch.int64, torch.int64  # seed and needs
_OF_KINDS = (torch.float32, torch.int32, torch.int64, torch.float64, torch.float32, torch.float32)
_DTYPES = (*_OF_REQUESTS, *_OF_KINDS)  # the last is of processed_scale
_ARRAY_DTYPES = [torch.empty(0, dtype=dtype, device="cpu").numpy().dtype for dtype in _DTYPES]
_ALIGNED = 16  # words; each column starts aligned, since kernels clone what is not
_WORD = torch.int32  # all columns lie in one tensor of these words, so that one copy brings them all
_FORMATS = {torch.int64: "q", torch.float32: "f", torch.int32: "i", torch.float64: "d"}
_pack_entry = struct.Struct("=" + "".join(map(_FORMATS.__getitem__, _DTYPES))).pack  # the words of an entry
_RESERVED = 1 << 17  # numbers of int64 that are pinned at once for plans that captures use first


class StagedTable:
    """A slot table whose entries are written on the host; those that changed travel with a step, or go in one copy.

    Args:
        num_slots: S.
        entry: of a free slot, its seed and its needs, then the other columns of ``SlotTable`` and ``processed_scale``.
        device: of the table.

    Attributes:
        words: what the table is made of.
        table: the slot table, for steps that serve every need.
        processed_scale: float32 ``[S]``, see ``LogprobInputs``; it lies beside the table and comes with it.
    """

    def __init__(self, num_slots: int, entry: Sequence[float | int], device: torch.device) -> None:
        """Fill all slots."""
        sizes = [num_slots * dtype.itemsize // _WORD.itemsize for dtype in _DTYPES]
        starts = [0, *itertools.accumulate(math.ceil(size / _ALIGNED) * _ALIGNED for size in sizes)]
        host = np.zeros(starts[-1], np.int32)
        parts = zip(starts, sizes, _ARRAY_DTYPES, strict=False)
        self._columns: list[Any] = []
        self._rests: list[object] = [None] * num_slots  # what each slot has behind its needs, once it was written
        for (start, size, dtype), value in zip(parts, entry, strict=True):
            column = host[start : start + size].view(dtype)
            column[:] = value
            self._columns.append(column.data)  # the same memory, whose entries are set in half the time
        self._places, self._steps = _places_of_first(starts)
        self._places_of: dict[int, bytes] = {}
        self.words = HostTable(host, len(self._places), device)
        with torch.inference_mode(False):  # a tensor made under inference mode could not be written outside of it
            places = zip(_DTYPES, starts, strict=False)
            there = self.words.there
            columns = [part_of(there, *place, (num_slots,), (1,)) for place in places]
            seeds, needs, *filters, self.processed_scale = columns
            self.table = SlotTable(*(seeds, *filters, needs, torch.zeros_like(needs[:1])))
        self._serving = {0: self.table}

    def serving(self, unserved: int) -> SlotTable:
        """The table for steps that do not serve some needs, given as bits; to be asked for first outside of captures.

        What a captured step reads lives as long as this object.
        """
        table = self._serving.get(unserved)
        if table is None:
            with torch.inference_mode(False):
                bits = torch.full_like(self.table.unserved, unserved)
            table = self._serving[unserved] = self.table._replace(unserved=bits)
        return table

    def write(self, slot: int, seed: int, needs: int, rest: tuple[float | int, ...]) -> None:
        """Write an entry on the host, which the next step brings to the device, or ``words.upload`` before.

        Args:
            slot: that gets it.
            seed: the number of the first column.
            needs: of the second.
            rest: of the others. The very tuple that the slot has is not written again.
        """
        seeds, all_needs, *columns = self._columns
        seeds[slot], all_needs[slot] = seed, needs
        if self._rests[slot] is not rest:
            self._rests[slot] = None  # until all of it is written
            for column, value in zip(columns, rest, strict=True):
                column[slot] = value
            self._rests[slot] = rest
        places = self._places_of.get(slot)
        if places is None:
            places = self._places_of[slot] = (self._places + slot * self._steps).tobytes()
        self.words.change(places, _pack_entry(seed, needs, *rest))


def _places_of_first(starts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The words of the entry of slot 0, int64, and how far each is from the same word of the next slot."""
    counts = [dtype.itemsize // _WORD.itemsize for dtype in _DTYPES]
    places = [start + i for start, count in zip(starts, counts, strict=False) for i in range(count)]
    return np.array(places), np.repeat(counts, counts)


class PinnedReserve:
    """Pinned memory for captures, which may allocate none: what a graph uploads must stay where it is for good.

    Args:
        device: that reads it; for a CPU there is none.

    Attributes:
        size: numbers of int64 that ``take`` has, without limit for a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate nothing."""
        self._left = torch.empty(0, dtype=torch.int64, device="cpu")
        self.size: float = math.inf if device.type == "cpu" else 0

    def keep(self, size: int) -> None:
        """Let ``take`` have ``size`` numbers of int64, more than it has; not to be called inside a capture."""
        self.size = max(size, _RESERVED)
        self._left = torch.empty(self.size, dtype=torch.int64, device="cpu", pin_memory=True)

    def take(self, numbers: bytes) -> Tensor:
        """Numbers of int64 in memory that nobody else will use.

        Raises:
            RuntimeError: ``keep`` was called for fewer.
        """
        given = tensor_of(numbers, torch.int64)
        size = len(given)
        if len(self._left) < size:
            raise RuntimeError(
                f"{size} slots must be on the device before a capture begins, got a plan that no step has used and no "
                "pinned memory left; read plan.slot_ids before"
            )
        taken, self._left, self.size = self._left[:size], self._left[size:], self.size - size
        return taken.copy_(given)


class PlannedTensors:
    """The numbers of a plan: on the host, and once a step asks for tensors also on the device.

    Args:
        numbers: of int64 as the machine has them, ``[N]``, by the name of the input that they are of a step.
        device: where they go.
        reserve: for a capture that is the first to ask.

    Attributes:
        host: ``numbers``.
    """

    __slots__ = ("_device", "_reserve", "_there", "host")

    def __init__(self, numbers: dict[str, bytes], device: torch.device, reserve: PinnedReserve) -> None:
        """Upload nothing."""
        self.host, self._device, self._reserve = numbers, device, reserve
        self._there: dict[str, Tensor] | None = None

    @property
    def there(self) -> dict[str, Tensor]:
        """The tensors on the device, uploaded without a wait by the first that asks.

        A capture that is the first to ask takes the upload into its graph, whose memory nobody else may read.
        """
        if self._there is not None:
            return self._there
        if is_capturing(self._device):
            here = {name: self._reserve.take(each) for name, each in self.host.items()}
            return {name: each.to(self._device, non_blocking=True) for name, each in here.items()}
        numbers = {name: tensor_of(each, torch.int64) for name, each in self.host.items()}
        self._there = {name: _sent(each, self._device) for name, each in numbers.items()}
        return self._there

    def alike(self, numbers: dict[str, bytes]) -> PlannedTensors:
        """Further numbers of the same plan, for the same device."""
        return PlannedTensors(numbers, self._device, self._reserve)

    @property
    def uploaded(self) -> tuple[Tensor, ...]:
        """The tensors on the device; none before the first use."""
        return tuple((self._there or {}).values())

    def holds(self, name: str, tensor: object) -> bool:
        """Whether a tensor is the one of a name on the device."""
        return self._there is not None and self._there.get(name) is tensor


def sent(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Numbers on the device, without a wait; on a CPU they share their memory."""
    return _sent(torch.from_numpy(numbers), device)


def _sent(here: Tensor, device: torch.device) -> Tensor:
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)


def part_of(words: Tensor, dtype: torch.dtype, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Numbers that begin at a word, no view: compilers follow a view to its base, which has another dtype.

    Args:
        words: int32, whose memory they share.
        dtype: of the numbers.
        start: the first word.
        shape: of the numbers.
        strides: in numbers.
    """
    part = torch.empty(0, dtype=dtype, device=words.device)
    return part.set_(words.untyped_storage(), start * _WORD.itemsize // dtype.itemsize, shape, strides)
