"""Numbers of the host on their way to the device: sent through pinned memory, or fetched from it by graphs."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graph_cache.addresses import Binding, tensor_at
from graph_cache.registry import tensor_of

_MOST_BYTES, _MOST_SENT, _MOST_FETCHED, _MOST_PARTS = 1 << 21, 32, 64, 4096


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
        self._size, self._dtype, self._device = size, dtype, device
        self._half = entries_of_half(size * dtype.itemsize, _MOST_SENT)
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


_MOST_CHANGES = 4  # entries that travel with one fetch; requests come one by one, and more are faster in one copy


class HostTable:
    """Words of int32 on the device, of which the host has a copy: changes come by a fetch, or all words by a copy.

    Args:
        words: int32 ``[W]``; the copy of the host, which the owner writes before it calls ``change``.
        width: words of an entry.
        device: of the table.

    Attributes:
        there: int32 ``[W + 1]`` on the device; the last one is written by patches that change less than they may.
        is_pending: whether there are changes that the device does not have.
        travels: whether the last changes went with a fetch, so that the next may wait for one too.
        nothing: the patch that changes nothing, bytes.
        num_places: words that a patch writes.
    """

    def __init__(self, words: np.ndarray, width: int, device: torch.device) -> None:
        self._bytes, self._device = words.data.cast("B"), device
        with torch.inference_mode(False):  # a tensor made under inference mode could not be written outside of it
            self.there = torch.zeros(len(words) + 1, dtype=torch.int32, device=device)
            self._all = self.there[:-1]
            self._all.copy_(torch.from_numpy(words))
        self._ring = PinnedRing(len(words), torch.int32, device)
        self._changes: dict[bytes, bytes] = {}  # values by places; an entry that changes again is there once
        self.is_pending, self.travels = False, False
        self._is_lost = False  # whether the device lacks changes that are no longer listed
        self._no_places = np.full(width, len(words), np.int64).tobytes()
        self._no_values = bytes(4 * width)
        self.num_places = _MOST_CHANGES * width
        self.nothing = _MOST_CHANGES * self._no_places + _MOST_CHANGES * self._no_values

    def change(self, places: bytes, values: bytes) -> None:
        """Note that the host's copy has an entry that the device does not have.

        Args:
            places: of its words, int64 ``[width]``; entries have the same places or none in common.
            values: of its words, int32 ``[width]``.
        """
        self._changes[places] = values
        self.is_pending = True

    def taken(self) -> bytes | None:
        """What changed, for ``patched`` to write, which counts as there from now on.

        None where ``upload`` must bring it, since there is too much or something was lost.
        """
        missing = _MOST_CHANGES - len(self._changes)
        if missing < 0 or self._is_lost:
            return None
        places, values = b"".join(self._changes), b"".join(self._changes.values())
        self._changes.clear()
        self.is_pending = False
        return b"".join((places, self._no_places * missing, values, self._no_values * missing))

    def lose(self) -> None:
        """Count what was taken last as not there; all words are pending again."""
        self.is_pending = self._is_lost = True

    def patched(self, places: Tensor, values: Tensor) -> None:
        """Write a patch on the device, whose int64 places and int32 values ``[num_places]`` are there."""
        self.there.index_copy_(0, places, values)

    def upload(self) -> None:
        """Bring all words to the device, on the current stream and without a wait, if any change is pending.

        Raises:
            RuntimeError: a change is pending and the current stream is being captured, which would freeze it.
        """
        if not self.is_pending:
            return
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("changes of a table must not be pending inside a capture, which would freeze them")
        self._ring.send(self._bytes, self._all)
        self._changes.clear()
        self.is_pending = self._is_lost = self.travels = False  # only now: where it fails, a later upload tries again


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
        self._table = table
        nothing = b"" if table is None else table.nothing
        self._head = 1 + len(nothing) // 8  # the number of the next entry, then a patch of the table
        row, self._start = (_ALIGNED * -(-each // _ALIGNED) for each in (self._head + size, self._head))
        self._half, self._halves = entries_of_half(row * 8, _MOST_FETCHED), ReadHalves(device)
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
