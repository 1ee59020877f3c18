"""The owned buffer of an input: what a batch copies, sends or leaves there for a graph to fetch, and the fill after it.

Buffers are made outside of inference mode: a tensor made within it could not be written outside of it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from graph_cache.pinned import FetchRing, HostTable, PinnedRing
from graph_cache.registry import BufferSpec, first_rows


class InputBuffer:
    """An owned input ``[M * times, *T]``, whose first rows hold a batch and whose others hold the fill.

    Args:
        spec: tail, dtype, fill and times.
        capacity: the largest bucket M.
        device: of the buffer.
        memory: ``[M * times, *T]`` that becomes the buffer; None for new memory.

    Attributes:
        is_ragged: whether a batch may bring another number of rows than its own.
        held: numbers of the host that the first rows hold; None for what else they hold.
        num_held: rows that they are.
        filled: rows behind them hold the fill up to this one.
    """

    def __init__(self, spec: BufferSpec, capacity: int, device: torch.device, memory: Tensor | None = None) -> None:
        capacity *= spec.times
        self.spec = spec
        with torch.inference_mode(False):
            made = torch.empty(capacity, *spec.shape, dtype=spec.dtype, device=device) if memory is None else memory
            self.tensor = made.fill_(spec.fill)
        self.is_ragged = spec.is_ragged
        self._layout, self._itemsize = (self.tensor.dtype, self.tensor.stride()), spec.dtype.itemsize
        self._is_lent = False  # whether the caller may write any row at any time
        self._num_dirty = 0  # rows from this one on hold the fill
        self._views: dict[int, Tensor] = {}
        self.held: bytes | None = None
        self.num_held, self.filled = 0, 0
        self._sends = PinnedRing(capacity, spec.dtype, device)

    def lend(self) -> Tensor:
        """The buffer itself, for a caller who may write it: from now on nothing that it held counts as still there."""
        self._is_lent, self.held, self._num_dirty = True, None, self.tensor.shape[0]
        return self.tensor

    def rows(self, rows: int) -> Tensor:
        """The view of the first ``rows`` rows, kept for later calls."""
        view = self._views.get(rows)
        if view is None:
            with torch.inference_mode(False):
                view = self._views[rows] = self.tensor[:rows]
        return view

    def stage(
        self, source: Tensor | None, rows: int, bucket: int, targets: list[Tensor], sources: list[Tensor]
    ) -> None:
        """Fill rows ``[rows:bucket]``, and list the copy that writes the rows before them.

        A row is filled at most once for each time that it was copied to, so fills cost no more than copies.

        Args:
            source: ``[>= rows, >= tail...]``; this buffer itself is not copied; None stands for the fill in every row.
            rows: rows of the batch R.
            bucket: rows B that the variant reads.
            targets: list to which the destination of the copy is appended.
            sources: list to which its source of the same shape is appended.
        """
        self.held = None
        if source is None:
            rows = 0
        elif source.data_ptr() == self.tensor.data_ptr() and (source.dtype, source.stride()) == self._layout:
            if rows < bucket:
                self.tensor[rows:bucket].fill_(self.spec.fill)
            return
        else:
            if source.data_ptr() == self.tensor.data_ptr():
                source = source.clone()  # another view of this memory cannot be copied onto it
            if source.requires_grad:
                source = source.detach()
            view = self._views.get(rows)
            targets.append(self.rows(rows) if view is None else view)
            sources.append(first_rows(source, rows, self.spec.shape))
        if rows < bucket or rows > self._num_dirty:
            self._fill(rows, bucket)

    def forget(self) -> None:
        """Fill every row of a buffer of one number a row, which say what the callable may write besides its results."""
        if not self.spec.shape:
            self.tensor.fill_(self.spec.fill)
            self._num_dirty, self.held = self.tensor.shape[0] if self._is_lent else 0, None

    def hold(self, numbers: bytes, rows: int, bucket: int) -> None:
        """Send the first rows of numbers of the host, and fill rows ``[rows:bucket]``.

        Numbers that were sent last are not sent again, unless the buffer is lent.
        """
        size = rows * self._itemsize
        if len(numbers) != size:
            numbers = numbers[:size]
        if numbers != self.held:
            self.held, self._num_dirty = None, max(self._num_dirty, rows)
            self._sends.send(numbers, self.rows(rows))
        self._fill(rows, bucket)
        self._hold(numbers, rows, bucket)

    def _hold(self, numbers: bytes, rows: int, filled: int) -> None:
        """Note what the buffer holds now; of a lent one the caller may write any row."""
        self.held, self.num_held, self.filled = None if self._is_lent else numbers, rows, filled

    def _fill(self, rows: int, bucket: int) -> None:
        if rows < bucket and rows < self._num_dirty:
            end = bucket if self._is_lent else self._num_dirty  # behind the bucket a lent one is the caller's
            self.tensor[rows:end].fill_(self.spec.fill)
            self._num_dirty = self._num_dirty if self._is_lent else rows
        elif rows > self._num_dirty:
            self._num_dirty = rows


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
