"""The owned buffer of an input: what a batch copies there or writes on the host, and the fill after it.

Buffers are made outside of inference mode: a tensor made within it could not be written outside of it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from graph_cache.mirror import HostMirror, part_of
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

    def lend(self) -> Tensor:
        """The buffer itself, for a caller who may write it: from now on nothing that it held counts as still there."""
        self._is_lent, self._num_dirty = True, self.tensor.shape[0]
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
            bucket: rows P that the variant reads.
            targets: list to which the destination of the copy is appended.
            sources: list to which its source of the same shape is appended.
        """
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
            self._num_dirty = self.tensor.shape[0] if self._is_lent else 0

    def _fill(self, rows: int, bucket: int) -> None:
        if rows < bucket and rows < self._num_dirty:
            end = bucket if self._is_lent else self._num_dirty  # behind the bucket a lent one is the caller's
            self.tensor[rows:end].fill_(self.spec.fill)
            self._num_dirty = self._num_dirty if self._is_lent else rows
        elif rows > self._num_dirty:
            self._num_dirty = rows


class HostInput(InputBuffer):
    """An owned input of one int64 a row that lies in a mirror: a batch may bring it as bytes of the host.

    Args:
        spec: with ``on_host``.
        capacity: the largest bucket M.
        device: of the buffer.
        mirror: whose words it takes.
    """

    def __init__(self, spec: BufferSpec, capacity: int, device: torch.device, mirror: HostMirror) -> None:
        self._mirror, self._start, end = mirror, mirror.take(2 * capacity), 2 * capacity
        super().__init__(spec, capacity, device, part_of(mirror.there, torch.int64, self._start, (capacity,), (1,)))
        self._here = mirror.here[self._start : self._start + end].data.cast("B")
        self._fills = np.full(capacity, int(spec.fill), np.int64).tobytes()
        self._here[:] = self._fills  # an upload of other words may bring these too
        self._held: bytes | None = None  # what the first rows hold; None for what did not come from the host
        self._filled = 0  # rows behind them hold the fill up to this one

    def hold(self, numbers: bytes, rows: int, bucket: int) -> None:
        """Write the first rows of numbers on the host, and the fill up to ``bucket``, unless they are there."""
        size, end = rows * self._itemsize, bucket * self._itemsize
        if len(numbers) != size:
            numbers = numbers[:size]
        if numbers == self._held and bucket <= self._filled:
            return
        self._held, self._num_dirty = None, max(self._num_dirty, rows)  # an interrupt may come before all is written
        self._mirror.note(self._start, self._start + 2 * bucket)
        self._here[:size] = numbers
        if size < end:
            self._here[size:end] = self._fills[size:end]
        self._held, self._filled = numbers, bucket
        if self._num_dirty <= bucket:
            self._num_dirty = rows

    def stage(
        self, source: Tensor | None, rows: int, bucket: int, targets: list[Tensor], sources: list[Tensor]
    ) -> None:
        """As for any other input; what the host wrote before must not come back with an upload of other words."""
        if self._held is not None:
            self._here[:], self._held = self._fills, None
        super().stage(source, rows, bucket, targets, sources)

    def forget(self) -> None:
        """Fill every row, on the host too: the next upload may bring them."""
        self._here[:], self._held = self._fills, None
        super().forget()

    def lend(self) -> Tensor:
        """Refuse it: an upload may write any row.

        Raises:
            ValueError: always.
        """
        raise ValueError("an input of the host must not be lent, as uploads write it; pass a tensor to the run")
