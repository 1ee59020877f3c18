"""A ring of pinned memory that graphs read themselves: what the host wrote there needs no copy before the graph."""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import Tensor

from graph_cache.batches.registry import tensor_of
from graph_cache.batches.routing import Binding
from graph_cache.memory.addresses import tensor_at
from graph_cache.memory.host_table import HostTable
from graph_cache.memory.pinned import ReadHalves, entries_of_half

_MOST_ENTRIES = 64
_ALIGNED = 16  # numbers; where rows begin, since compiled callables copy what is not aligned
_given_up: list[tuple[torch.device, Tensor]] = []
"""Memory of rings that are gone, with the device whose graphs may still read it: the allocator would give it away at
once, since it knows of copies alone. It is released when the next ring is made."""


class FetchRing:
    """Entries of int64 numbers that the host writes in turn, and that a captured ``fetch`` reads in the same turn.

    A replay cannot be told where to read, so the device counts along: ``cursor`` says which entry a fetch reads, which
    leaves the number of the next one in ``following``, and whoever captures a fetch also captures the copy from the one
    to the other behind it. Each entry that was posted must be fetched by one replay, or be taken back.

    Args:
        size: the most numbers of a fetch.
        fill: what a fetch finds where nothing was posted.
        device: that fetches; for a CPU nothing is pinned.
        table: whose changes are posted with the numbers and written by the fetch; None for none.

    Attributes:
        target: int64 ``[size]`` on the device, whose first rows a fetch writes.
        cursor: int64 ``[1]`` on the device, the entry to fetch.
        following: int64 ``[1]`` on the device, the entry behind the one that was fetched last.
    """

    def __init__(self, size: int, fill: int, device: torch.device, table: HostTable | None = None) -> None:
        """Allocate the target and the ring; the entry to fetch first is 0."""
        self._table = table
        nothing = b"" if table is None else table.nothing
        self._head = 1 + len(nothing) // 8  # the number of the next entry, then a patch of the table
        row, self._start = (_ALIGNED * -(-each // _ALIGNED) for each in (self._head + size, self._head))
        self._half, self._halves = entries_of_half(row * 8, _MOST_ENTRIES), ReadHalves(device)
        self._size = count = 2 * self._half  # entries in turn; one more is for fetches of nothing
        is_pinned = device.type != "cpu"
        with torch.inference_mode(False), torch.cuda.device(device) if is_pinned else contextlib.nullcontext():
            memory = torch.full((count + 1, row), fill, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
            memory[:count, 0] = torch.arange(1, count + 1, device="cpu") % count
            memory[count, 0] = count
            memory[:, 1 : self._head] = tensor_of(nothing, torch.int64)
            self._entries = tensor_at(Binding.of("", memory), device) if is_pinned else memory
            self._is_mapped = self._entries.data_ptr() == memory.data_ptr()  # not if it is pinned for another device
            self._there = torch.full((self._start + size,), fill, dtype=torch.int64, device=device)
            self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
            self.target = torch.empty(0, dtype=torch.int64, device=device)  # no view, whose base compilers would see
            self.target.set_(self._there.untyped_storage(), self._start, (size,), (1,))
            head = self._there[self._start - self._head : self._start]
            self.following, self._patch = head[:1], head[1:]
        if is_pinned:
            _release_given_up()
            weakref.finalize(self, _given_up.append, (device, memory)).atexit = False
        self._bytes, self._row = memory.numpy().data.cast("B"), 8 * row
        self._count = 0  # entries posted
        self._has_patch = False  # whether what was posted last changes the table
        self.pause()
        self.fetch(size)  # loads its kernels, which a capture might forbid
        self.resume()

    def post(self, numbers: bytes, padding: bytes) -> bool:
        """Whether there was room for numbers and what follows them, which the next fetch then finds.

        There never is any where the device cannot read the ring: pinned memory that was used for another device.

        From now on they count as fetched, and changes of the table as there; ``take_back`` undoes that.

        Args:
            numbers: int64 as the machine has them.
            padding: the same, for the rows behind them.
        """
        if not self._is_mapped or (not self._count % self._half and not self._turn()):
            return False
        start = self._count % self._size * self._row + 8 * self._head
        end = start + len(numbers)
        self._bytes[start:end] = numbers
        if padding:
            self._bytes[end : end + len(padding)] = padding
        if self._table is not None:
            self._post_patch(self._table, start)
        self._count += 1
        return True

    def take_back(self) -> None:
        """Count what was posted last as not posted, since no fetch of it was issued."""
        self._count -= 1
        self._lose_patch()

    def doubt(self) -> None:
        """Count what was posted last as lost, since nobody knows whether it was fetched, and pass over it."""
        self._lose_patch()
        self.resume()

    def fetch(self, rows: int) -> None:
        """Write the first ``rows`` numbers of the entry at ``cursor`` into ``target``, and its patch into the table."""
        there = self._there[self._start - self._head : self._start + rows]
        torch.index_select(self._entries[:, : len(there)], 0, self.cursor, out=there[None])
        if self._table is not None:
            places = self._patch[: self._table.num_places]
            self._table.patched(places, self._patch[self._table.num_places :].view(torch.int32))

    def pause(self) -> None:
        """Let fetches find nothing from now on, on the current stream, until ``resume``."""
        self.cursor.fill_(self._size)

    def resume(self) -> None:
        """Let the next fetch find what is posted next."""
        self.cursor.fill_(self._count % self._size)

    def _post_patch(self, table: HostTable, end: int) -> None:
        """Write what changed in the table into an entry, up to a byte of the ring; a copy brings what is too much."""
        self._has_patch = table.is_pending  # said before it is taken, as an interrupt may come between
        patch = table.taken() if table.is_pending else None
        if table.is_pending:
            table.upload()
            self._has_patch = False
        self._bytes[end - len(table.nothing) : end] = patch or table.nothing
        table.travels = True

    def _lose_patch(self) -> None:
        if self._has_patch and self._table is not None:
            self._table.lose()
        self._has_patch = False

    def _turn(self) -> bool:
        """Whether the half that begins may be written: the device has read what was written there before."""
        half = self._count // self._half % 2
        if self._count:
            self._halves.note(1 - half)
        return self._halves.are_done(half)


def _release_given_up() -> None:
    """Release the memory of rings that are gone, once no device reads it."""
    if _given_up and not torch.cuda.is_current_stream_capturing():
        released = _given_up[:]  # more may be given up meanwhile
        for device in {device for device, _ in released}:
            torch.cuda.synchronize(device)
        del _given_up[: len(released)]
