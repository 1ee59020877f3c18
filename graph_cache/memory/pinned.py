"""A ring of pinned memory: what the host wrote goes to the device in one asynchronous copy, without an allocation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MOST_BYTES, _MOST_ENTRIES, _MOST_PARTS = 1 << 21, 32, 4096


def entries_of_half(row_bytes: int, most_entries: int) -> int:
    """Entries of each half of a ring, at least one: as many as asked for, in bounded memory.

    Args:
        row_bytes: of an entry.
        most_entries: of both halves.
    """
    return max(1, min(most_entries, _MOST_BYTES // max(row_bytes, 1)) // 2)


class ReadHalves:
    """Which half of a ring a device has read; nothing is recorded for a CPU, which reads at once.

    Args:
        device: that reads.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing is written yet."""
        self._device = device
        self._events: list[Any] = [None, None]  # behind the reads of each half, which are untyped in torch

    def note(self, half: int) -> None:
        """Note once that the reads of a half are issued, on the current stream of the device."""
        if self._device.type == "cpu" or self._events[half] is not None:
            return
        make_event: Any = torch.cuda.Event
        event = make_event()
        event.record(torch.cuda.current_stream(self._device))
        self._events[half] = event

    def are_done(self, half: int) -> bool:
        """Whether all noted reads of a half are done; if so they are forgotten."""
        event = self._events[half]
        if event is not None and not event.query():
            return False
        self._events[half] = None
        return True


class PinnedRing:
    """Sends numbers to a device; what was sent may be overwritten at once.

    An entry is written again only when the device has read it. Events of half a ring tell so; where it is behind, the
    ring moves to new memory instead of a wait, and torch keeps the old one until it was read. Sends are ordered by the
    stream that they are issued on.

    Args:
        size: the most numbers of a send.
        dtype: of the numbers.
        device: where they go; for a CPU nothing is pinned.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate nothing; the first send does."""
        self._size, self._dtype, self._device = size, dtype, device
        self._half = entries_of_half(size * dtype.itemsize, _MOST_ENTRIES)
        self._entry, self._halves = 0, ReadHalves(device)
        self._memory: Tensor | None = None
        self._parts: dict[tuple[int, int], tuple[memoryview, Tensor]] = {}

    def send(self, numbers: bytes | memoryview, target: Tensor) -> None:
        """Copy numbers, as the machine has them, into ``target`` on the current stream, without a wait.

        Args:
            numbers: bytes, or a view of bytes that may be written.
            target: of one dimension, with as many numbers of the ring's dtype.
        """
        if self._device.type == "cpu":
            here = bytearray(numbers) if isinstance(numbers, bytes) else numbers  # torch wants what may be written
            target.copy_(torch.frombuffer(here, dtype=self._dtype))
            return
        entry, size = self._entry, len(numbers)
        if not entry % self._half:
            self._turn()
        self._entry = (entry + 1) % (2 * self._half)
        part = self._parts.get((entry, size))
        pinned, there = self._new_part(entry, size) if part is None else part
        pinned[:] = numbers
        target.copy_(there, non_blocking=True)

    def _turn(self) -> None:
        """Go on to the other half, in new memory if the device has not yet read what that half held."""
        half = self._entry // self._half
        if self._memory is not None:
            self._halves.note(1 - half)
        if self._memory is None or not self._halves.are_done(half):
            shape = (2 * self._half, self._size)
            self._memory = torch.empty(shape, dtype=self._dtype, device="cpu", pin_memory=True)
            self._parts.clear()
            self._halves = ReadHalves(self._device)

    def _new_part(self, entry: int, size: int) -> tuple[memoryview, Tensor]:
        """The first bytes of an entry, to be written, and the tensor of the same memory; kept for later sends."""
        assert self._memory is not None
        if len(self._parts) >= _MOST_PARTS:
            self._parts.clear()
        tensor = self._memory[entry, : size // self._dtype.itemsize]
        part = self._parts[entry, size] = tensor.view(torch.uint8).numpy().data, tensor  # numpy has no bfloat16
        return part
