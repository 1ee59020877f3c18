"""The owned buffer of an input whose numbers graphs fetch themselves from where the host left them."""

from __future__ import annotations

import numpy as np
import torch

from graph_cache.batches.registry import BufferSpec
from graph_cache.memory.fetching import FetchRing
from graph_cache.memory.host_table import HostTable
from graph_cache.memory.inputs import InputBuffer


class FetchedInput(InputBuffer):
    """An owned input of one int64 a row, which is posted for graphs that fetch it, or sent like any other.

    Args:
        spec: with ``fetched``.
        capacity: the largest bucket M.
        device: of the buffer.
        table: whose changes travel with it; None for none.

    Attributes:
        ring: from which graphs fetch.
    """

    def __init__(self, spec: BufferSpec, capacity: int, device: torch.device, table: HostTable | None) -> None:
        """Allocate the ring, and let its target be the buffer."""
        fill = int(spec.fill)
        self.ring = FetchRing(capacity, fill, device, table)
        super().__init__(spec, capacity, device, self.ring.target)
        self._padding = np.full(capacity, fill, np.int64).tobytes()

    def post(self, numbers: bytes, rows: int, bucket: int) -> bool:
        """Whether there was room for the first rows of numbers of the host, and the fill up to ``bucket``.

        If so they count as there from now on, since a graph that fetches them is replayed next; ``take_back`` undoes
        that. If not they must be sent.
        """
        size = rows * self._itemsize
        if len(numbers) != size:
            numbers = numbers[:size]
        if not self.ring.post(numbers, self._padding[size : bucket * self._itemsize] if rows < bucket else b""):
            return False
        self._hold(numbers, rows, bucket)
        if self._num_dirty <= bucket and not self._is_lent:
            self._num_dirty = rows
        return True

    def take_back(self) -> None:
        """Count what was posted last as not posted, since no graph has fetched it."""
        self.ring.take_back()
        self.held, self._num_dirty = None, self.tensor.shape[0]

    def doubt(self) -> None:
        """Count nothing as there, since nobody knows whether a graph has fetched what was posted last."""
        self.ring.doubt()
        self.held, self._num_dirty = None, self.tensor.shape[0]
