"""A ring of pinned memory that graphs read themselves: what the host wrote there needs no copy before the graph."""

from __future__ import annotations

from typing import Any

import torch

from graph_cache.batches.routing import Binding
from graph_cache.memory.addresses import tensor_at

_MOST_BYTES, _MOST_ENTRIES = 1 << 21, 64
_ALIGNED = 16  # numbers; where rows begin, since compiled callables copy what is not aligned


class FetchRing:
    """Entries of int64 numbers that the host writes in turn, and that a captured ``fetch`` reads in the same turn.

    A replay cannot be told where to read, so the device counts along: ``cursor`` says which entry a fetch reads, which
    leaves the number of the next one in ``following``, and whoever captures a fetch also captures the copy from the one
    to the other behind it. The host counts those replays alone that were issued.

    Args:
        size: the most numbers of a fetch.
        device: that fetches; for a CPU nothing is pinned.

    Attributes:
        target: int64 ``[size]`` on the device, whose first rows a fetch writes.
        cursor: int64 ``[1]`` on the device, the entry to fetch.
        following: int64 ``[1]`` on the device, the entry behind the one that was fetched last.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate the target and the ring; the entry to fetch first is 0."""
        self._is_host = device.type == "cpu"
        row = _ALIGNED * -(-(1 + size) // _ALIGNED)
        self._half = max(1, min(_MOST_ENTRIES, _MOST_BYTES // (row * 8)) // 2)
        self._size = count = 2 * self._half
        with torch.inference_mode(False):
            memory = torch.zeros(count, row, dtype=torch.int64, device="cpu", pin_memory=not self._is_host)
            memory[:, 0] = torch.arange(1, count + 1) % count
            self._entries = memory if self._is_host else tensor_at(Binding.of("", memory), device)
            self._there = torch.zeros(_ALIGNED + size, dtype=torch.int64, device=device)
            self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
            self.target = torch.empty(0, dtype=torch.int64, device=device)  # no view, whose base compilers would see
            self.following = self._there[_ALIGNED - 1 : _ALIGNED]
            self.target.set_(self._there.untyped_storage(), _ALIGNED, (size,), (1,))
        self._memory, self._bytes, self._row = memory, memory.numpy().data.cast("B"), 8 * row
        self._count = 0  # entries taken
        self._read: list[Any] = [None, None]  # events of the halves that were written, which are untyped in torch

    def post(self, numbers: bytes, padding: bytes) -> bool:
        """Write numbers and what follows them for the next fetch, or return False as long as the ring is full.

        Args:
            numbers: int64 as the machine has them.
            padding: the same, for the rows behind them.
        """
        if not self._count % self._half and not self._turn():
            return False
        start = self._count % self._size * self._row + 8
        end = start + len(numbers)
        self._bytes[start:end] = numbers
        if padding:
            self._bytes[end : end + len(padding)] = padding
        return True

    def taken(self) -> None:
        """Count a fetch of what was posted, which was issued on the current stream."""
        self._count += 1

    def fetch(self, rows: int) -> None:
        """Write the first ``rows`` numbers of the entry at ``cursor`` into ``target``, on the device."""
        there = self._there[_ALIGNED - 1 : _ALIGNED + rows]
        torch.index_select(self._entries[:, : 1 + rows], 0, self.cursor, out=there[None])

    def rewind(self) -> None:
        """Let the device fetch what the host posts next, after fetches that the host did not count."""
        self.cursor.fill_(self._count % self._size)

    def _turn(self) -> bool:
        """Whether the half that begins may be written: the device has read what was written there before."""
        if self._is_host:
            return True
        half = self._count // self._half % 2
        if self._count and self._read[1 - half] is None:
            make_event: Any = torch.cuda.Event
            event = self._read[1 - half] = make_event()
            event.record()
        pending = self._read[half]
        if pending is not None and not pending.query():
            return False
        self._read[half] = None
        return True
