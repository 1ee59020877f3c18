"""A ring of pinned memory: arrays of the host go to the device in one asynchronous copy each, without an allocation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_MOST_BYTES, _MOST_ENTRIES, _MOST_VIEWS = 1 << 21, 32, 4096


class PinnedRing:
    """Sends arrays to a device; what was sent may be overwritten at once.

    An entry is written again only when the device has read it. Events of half a ring tell so; where it is behind, the
    ring moves to new memory instead of a wait, and torch keeps the old one until it was read. Sends are ordered by the
    stream that they are issued on.

    Args:
        size: elements of the largest array.
        dtype: of the arrays.
        device: where they go; for a CPU nothing is pinned.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate nothing; the first array that is sent does."""
        self._size, self._dtype, self._is_host = size, dtype, device.type == "cpu"
        self._half = max(1, min(_MOST_ENTRIES, _MOST_BYTES // max(size * dtype.itemsize, 1)) // 2)
        self._entry = 0
        self._read: list[Any] = [None, None]  # events, which are untyped in torch
        self._memory: Tensor | None = None
        self._arrays: Any = ()
        self._views: dict[tuple[int, int], Tensor] = {}

    def send(self, array: np.ndarray, target: Tensor) -> None:
        """Copy an array of one dimension into ``target`` on the current stream, without a wait."""
        if self._is_host:
            target.copy_(torch.from_numpy(array))
            return
        if self._entry % self._half == 0:
            self._turn()
        entry, size = self._entry, len(array)
        self._entry = (entry + 1) % (2 * self._half)
        self._arrays[entry][:size] = array
        target.copy_(self._view(entry, size), non_blocking=True)

    def _turn(self) -> None:
        """Go on to the other half, in new memory if the device has not yet read what that half held."""
        half = self._entry // self._half
        if self._memory is not None:
            make_event: Any = torch.cuda.Event
            event = self._read[1 - half] = make_event()
            event.record()
        pending = self._read[half]
        if self._memory is None or (pending is not None and not pending.query()):
            shape = (2 * self._half, self._size)
            self._memory = torch.empty(shape, dtype=self._dtype, device="cpu", pin_memory=True)
            self._arrays = list(self._memory.numpy())
            self._views.clear()
            self._read = [None, None]

    def _view(self, entry: int, size: int) -> Tensor:
        view = self._views.get((entry, size))
        if view is None:
            assert self._memory is not None
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            view = self._views[entry, size] = self._memory[entry, :size]
        return view
