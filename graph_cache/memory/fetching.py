"""A ring of pinned memory that graphs read themselves: what the host wrote there needs no copy before the graph."""

from __future__ import annotations

from typing import Any

import torch

from graph_cache.batches.registry import tensor_of
from graph_cache.batches.routing import Binding
from graph_cache.memory.addresses import tensor_at
from graph_cache.memory.host_table import HostTable

_MOST_BYTES, _MOST_ENTRIES = 1 << 21, 64
_ALIGNED = 16  # numbers; where rows begin, since compiled callables copy what is not aligned


class FetchRing:
    """Entries of int64 numbers that the host writes in turn, and that a captured ``fetch`` reads in the same turn.

    A replay cannot be told where to read, so the device counts along: ``cursor`` says which entry a fetch reads, which
    leaves the number of the next one in ``following``, and whoever captures a fetch also captures the copy from the one
    to the other behind it. Each entry that was posted must be fetched by one replay, or be taken back.

    Args:
        size: the most numbers of a fetch.
        device: that fetches; for a CPU nothing is pinned.
        table: whose changes are posted with the numbers and written by the fetch; None for none.

    Attributes:
        target: int64 ``[size]`` on the device, whose first rows a fetch writes.
        cursor: int64 ``[1]`` on the device, the entry to fetch.
        following: int64 ``[1]`` on the device, the entry behind the one that was fetched last.
    """

    def __init__(self, size: int, device: torch.device, table: HostTable | None = None) -> None:
        """Allocate the target and the ring; the entry to fetch first is 0."""
        self._is_host, self._table = device.type == "cpu", table
        nothing = b"" if table is None else table.nothing
        self._head = 1 + len(nothing) // 8  # the number of the next entry, then a patch of the table
        row, self._start = (_ALIGNED * -(-each // _ALIGNED) for each in (self._head + size, self._head))
        self._half = max(1, min(_MOST_ENTRIES, _MOST_BYTES // (row * 8)) // 2)
        self._size = count = 2 * self._half
        with torch.inference_mode(False):
            memory = torch.zeros(count, row, dtype=torch.int64, device="cpu", pin_memory=not self._is_host)
            memory[:, 0] = torch.arange(1, count + 1, device="cpu") % count
            memory[:, 1 : self._head] = tensor_of(nothing, torch.int64)
            self._entries = memory if self._is_host else tensor_at(Binding.of("", memory), device)
            self._there = torch.zeros(self._start + size, dtype=torch.int64, device=device)
            self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
            self.target = torch.empty(0, dtype=torch.int64, device=device)  # no view, whose base compilers would see
            self.target.set_(self._there.untyped_storage(), self._start, (size,), (1,))
            head = self._there[self._start - self._head : self._start]
            self.following, self._patch = head[:1], head[1:]
        self._memory, self._bytes, self._row = memory, memory.numpy().data.cast("B"), 8 * row
        self._count = 0  # entries taken
        self._patched: set[int] = set()  # entries with a patch
        self._read: list[Any] = [None, None]  # events of the halves that were written, which are untyped in torch
        self.fetch(size)  # loads its kernels, which a capture might forbid; it finds an entry that changes nothing

    def post(self, numbers: bytes, padding: bytes) -> bool:
        """Write numbers and what follows them for the next fetch, or return False as long as the ring is full.

        From now on they count as fetched, and changes of the table as there; ``lose`` takes that back.

        Args:
            numbers: int64 as the machine has them.
            padding: the same, for the rows behind them.
        """
        if not self._count % self._half and not self._turn():
            return False
        entry = self._count % self._size
        start = entry * self._row + 8 * self._head
        end = start + len(numbers)
        self._bytes[start:end] = numbers
        if padding:
            self._bytes[end : end + len(padding)] = padding
        if self._table is not None:
            self._post_patch(self._table, entry, start)
        self._count += 1
        return True

    def lose(self) -> None:
        """Take back what was posted last, since no fetch of it was issued."""
        self._count -= 1
        if self._table is not None and self._count % self._size in self._patched:
            self._table.lose()

    def _post_patch(self, table: HostTable, entry: int, end: int) -> None:
        """Write what changed in the table into an entry, up to a byte of the ring; a copy brings what is too much."""
        patch = None
        if table.is_pending and (patch := table.taken()) is None:
            table.upload()
        if patch is not None:
            self._patched.add(entry)
        elif entry in self._patched:  # one of before, which must not be written again
            self._patched.discard(entry)
            patch = table.nothing
        if patch is not None:
            self._bytes[end - len(patch) : end] = patch
        table.travels = True

    def fetch(self, rows: int) -> None:
        """Write the first ``rows`` numbers of the entry at ``cursor`` into ``target``, and its patch into the table."""
        there = self._there[self._start - self._head : self._start + rows]
        torch.index_select(self._entries[:, : len(there)], 0, self.cursor, out=there[None])
        if self._table is not None:
            places = self._patch[: self._table.num_places]
            self._table.patched(places, self._patch[self._table.num_places :].view(torch.int32))

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
