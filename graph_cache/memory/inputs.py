"""The owned buffer of an input: what a batch copies or sends there, and the fill behind it.

Buffers are made outside of inference mode: a tensor made within it could not be written outside of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graph_cache.batches.registry import BufferSpec, first_rows
from graph_cache.memory.pinned import PinnedRing


class InputBuffer:
    """An owned input ``[M * times, *T]``, whose first rows hold a batch and whose others hold the fill.

    Args:
        spec: tail, dtype, fill and times.
        capacity: the largest bucket M.
        device: of the buffer.
        memory: ``[M * times, *T]`` that becomes the buffer; None for new memory.

    Attributes:
        held: numbers of the host that the first rows hold; None for what else they hold.
        num_held: rows that they are.
        filled: rows behind them hold the fill up to this one.
    """

    def __init__(self, spec: BufferSpec, capacity: int, device: torch.device, memory: Tensor | None = None) -> None:
        """Allocate the buffer and fill it."""
        capacity *= spec.times
        self.spec = spec
        with torch.inference_mode(False):
            made = torch.empty(capacity, *spec.shape, dtype=spec.dtype, device=device) if memory is None else memory
            self.tensor = made.fill_(spec.fill)
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
            targets.append(self.rows(rows))
            sources.append(first_rows(source.detach() if source.requires_grad else source, rows, self.spec.shape))
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
