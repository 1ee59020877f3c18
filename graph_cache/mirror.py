"""Numbers of the host on their way to the device: what changed since the last run goes there in one copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MOST_BYTES, _MOST_SENT, _MOST_SLICES = 1 << 21, 32, 4096
_ALIGNED = 16  # words; where parts begin, since compiled callables copy what is not aligned
_WORD = torch.int32


class PinnedRing:
    """Sends ``size`` words at most to a device; what was sent may be overwritten at once."""

    # An entry is written again only when the device has read it. Events of half a ring tell so; where it is behind, the
    # ring moves to new memory instead of a wait, and torch keeps the old one until it was read. Sends are ordered by
    # the stream that they are issued on.

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device, self._is_cpu = size, device, device.type == "cpu"
        self._half = max(1, min(_MOST_SENT, _MOST_BYTES // max(4 * size, 1)) // 2)  # entries of each half
        self._entry = 0
        self._events: list[Any] = [None, None]  # recorded when all entries of a half were sent; untyped in torch
        self._memory: Any = None  # pinned, ``size`` words for each entry; and the same as slices and as bytes
        self._slice = _kept_slices(torch.empty(0))
        self._bytes = memoryview(b"")

    def send(self, words: bytes | memoryview, target: Tensor) -> None:
        """Copy the bytes of words into ``target``, int32 of one dimension, on the current stream, without a wait."""
        if self._is_cpu:
            here = bytearray(words) if isinstance(words, bytes) else words  # torch wants what may be written
            target.copy_(torch.frombuffer(here, dtype=_WORD))
            return
        entry, size = self._entry, len(words)
        if not entry % self._half:
            self._turn()
        self._entry = (entry + 1) % (2 * self._half)
        first, item = entry * self._size, _WORD.itemsize
        self._bytes[first * item : first * item + size] = words
        target.copy_(self._slice(first, first + size // item), non_blocking=True)

    def _turn(self) -> None:
        """Go on to the other half, in new memory if the device has not yet read what that half held."""
        half = self._entry // self._half
        if self._memory is not None and self._events[1 - half] is None:
            make_event: Any = torch.cuda.Event
            self._events[1 - half] = event = make_event()
            event.record(torch.cuda.current_stream(self._device))
        is_behind = self._events[half] is not None and not self._events[half].query()
        if self._memory is None or is_behind:
            self._memory = torch.empty(2 * self._half * self._size, dtype=_WORD, device="cpu", pin_memory=True)
            self._slice, self._bytes = _kept_slices(self._memory), self._memory.numpy().data.cast("B")
            self._events = [None, None]
        self._events[half] = None


def _kept_slices(tensor: Tensor) -> Callable[[int, int], Tensor]:
    """Slices of a tensor of one dimension, which are kept: a new one takes 1 to 3 us of a step."""

    def new_slice(first: int, end: int) -> Tensor:
        with torch.inference_mode(False):
            return tensor[first:end]

    return lru_cache(_MOST_SLICES)(new_slice)


def part_of(words: Tensor, dtype: torch.dtype, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Numbers in the memory of int32 ``words`` from word ``start`` on; strides are in numbers."""
    # It is no view: compilers follow a view to its base, which has another dtype.
    with torch.inference_mode(False):  # a tensor made under inference mode could not be written outside of it
        part = torch.empty(0, dtype=dtype, device=words.device)
        return part.set_(words.untyped_storage(), start * _WORD.itemsize // dtype.itemsize, shape, strides)


class HostMirror:
    """Words of int32 on the device, and the same on the host, which writes them: a run brings over what changed.

    Inputs that batches bring as bytes lie there, and what else callables read that the host writes, such as a table.

    Args:
        num_words: W, of all parts, each aligned by ``aligned``.
        device: of the words.

    Attributes:
        here: int32 ``[W]`` on the host; who writes it calls ``note`` afterwards.
        there: int32 ``[W]`` on the device.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.here = np.zeros(num_words, np.int32)
        with torch.inference_mode(False):  # a tensor made under inference mode could not be written outside of it
            self.there = torch.zeros(num_words, dtype=_WORD, device=device)
        self._bytes, self._slice, self._device = self.here.data.cast("B"), _kept_slices(self.there), device
        self._ring = PinnedRing(num_words, device)
        self._num_taken = 0
        self._first, self._end = num_words, 0  # of the words that the device lacks

    @staticmethod
    def aligned(num_words: int) -> int:
        """The words that a part of so many takes."""
        return -(-num_words // _ALIGNED) * _ALIGNED

    def take(self, num_words: int) -> int:
        """The first word of a part that nobody else has.

        Raises:
            ValueError: there is no room.
        """
        start, end = self._num_taken, self._num_taken + self.aligned(num_words)
        if end > len(self.here):
            raise ValueError(f"a mirror must have {end} words, got {len(self.here)}; HostMirror(num_words)")
        self._num_taken = end
        return start

    @property
    def is_pending(self) -> bool:
        """Whether the device lacks words."""
        return self._first < self._end

    def note(self, start: int, end: int) -> None:
        """Note that the host has written words."""
        self._first, self._end = min(self._first, start), max(self._end, end)

    def upload(self, *, is_replayed: bool = False) -> None:
        """Bring to the device what it lacks, and what lies between, on the current stream and without a wait.

        Args:
            is_replayed: whether a graph is replayed next, which nothing captures.

        Raises:
            RuntimeError: it lacks words and the current stream is being captured, which would freeze them.
        """
        first, end = self._first, self._end
        if first >= end:
            return
        if not is_replayed and self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("words of a mirror must not be pending inside a capture, which would freeze them")
        size = _WORD.itemsize
        self._ring.send(self._bytes[first * size : end * size], self._slice(first, end))
        self._first, self._end = len(self.here), 0  # only now: where it fails, a later upload tries again
