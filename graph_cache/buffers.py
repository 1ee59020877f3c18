"""The static tensors that captured graphs read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Results = tuple[Tensor, ...]

# What torch's multi-tensor copy kernel takes; other dtypes are copied one tensor a launch.
_BATCHED_DTYPES = frozenset(
    (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
)


@dataclass(frozen=True)
class BufferSpec:
    """The layout of one input of a callable.

    Attributes:
        shape: the tail T after the row dimension; ``()`` for one value a row.
        dtype: element type.
        fill: what rows hold that belong to no request; the callable must bear it. It is also what a covering
            callable reads in an input that the covered one lacks.
        times: rows of this input for each row of a batch, at most.
        ragged: whether a batch may bring fewer: as many rows as it needs, and the callable finds in other inputs which
            of them belongs to what. With ``times`` above 1 every input is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: int | float
    times: int = 1
    ragged: bool = False

    def __post_init__(self) -> None:
        """Raises TypeError when the dtype would round the fill, ValueError when ``times`` is below 1."""
        if self.times < 1:
            raise ValueError(f"times must be >= 1, got {self.times}; 1 is one row for each row of a batch")
        if isinstance(self.fill, float) and not self.dtype.is_floating_point:
            raise TypeError(f"fill must be an integer for {self.dtype}, got {self.fill}; it is written as it is")

    @property
    def is_ragged(self) -> bool:
        """Whether the input's rows are not the batch's."""
        return self.ragged or self.times > 1


def rows_used(tensor: Tensor, spec: BufferSpec, rows: int) -> int:
    """The rows of an input that belong to a batch of ``rows``: all that a ragged input brings, up to its share."""
    return min(tensor.shape[0], rows * spec.times) if spec.is_ragged else rows


def first_rows(tensor: Tensor, rows: int, tail: tuple[int, ...]) -> Tensor:
    """The view ``[rows, *tail]`` at the origin of ``tensor`` (``[>= rows, >= tail...]``, any strides)."""
    if tensor.shape == (rows, *tail):
        return tensor
    return tensor[tuple(slice(size) for size in (rows, *tail))]


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into the target of the same index, in one launch for all dense pairs of a dtype.

    Args:
        targets: tensors on one device.
        sources: the same shapes, dtypes and device; any strides.
    """
    batches: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if source.dtype in _BATCHED_DTYPES and source.is_contiguous() and target.is_contiguous():
            batch = batches.setdefault(source.dtype, ([], []))
            batch[0].append(target)
            batch[1].append(source)
        else:
            target.copy_(source, non_blocking=True)
    for into, values in batches.values():
        if len(into) == 1:
            into[0].copy_(values[0], non_blocking=True)
        else:
            torch._foreach_copy_(into, values, non_blocking=True)


class InputBuffer:
    """An owned input ``[M, *T]``, whose rows hold a batch first and the fill after it."""

    def __init__(self, spec: BufferSpec, capacity: int, device: torch.device) -> None:
        """Allocates it, filled.

        Args:
            spec: tail, dtype and fill.
            capacity: the largest bucket M; the buffer holds ``times`` as many rows.
            device: where it lives.
        """
        capacity *= spec.times
        self.spec = spec
        # A tensor made under inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self.tensor = torch.full((capacity, *spec.shape), spec.fill, dtype=spec.dtype, device=device)
        self._stride = self.tensor.stride()
        self._num_dirty = 0  # rows from here on hold the fill
        self._views: dict[int, Tensor] = {}

    def rows(self, rows: int) -> Tensor:
        """The view of the first ``rows`` rows, made once."""
        view = self._views.get(rows)
        if view is None:
            with torch.inference_mode(False):
                view = self._views[rows] = self.tensor[:rows]
        return view

    def stage(
        self, source: Tensor | None, rows: int, bucket: int, targets: list[Tensor], sources: list[Tensor]
    ) -> None:
        """Makes rows ``[rows:bucket]`` the fill and lists the copy that fills the rows before them.

        A row is filled at most once for each time that it was copied to, so fills never cost more than copies did.

        Args:
            source: ``[>= rows, >= tail...]``; this very buffer needs no copy; None stands for the fill in every row.
            rows: rows of the batch R.
            bucket: rows the variant reads B.
            targets: gets the destination of the copy.
            sources: gets its source, of the same shape.
        """
        if source is None:
            rows = 0
        elif source.data_ptr() == self.tensor.data_ptr() and source.stride() == self._stride:
            if rows < bucket:
                self.tensor[rows:bucket].fill_(self.spec.fill)
            self._num_dirty = self.tensor.shape[0]  # the caller writes where it likes
            return
        else:
            if source.data_ptr() == self.tensor.data_ptr():
                source = source.clone()  # another view of this memory cannot be copied onto it
            targets.append(self.rows(rows))
            sources.append(first_rows(source.detach() if source.requires_grad else source, rows, self.spec.shape))
        if rows < bucket and rows < self._num_dirty:
            self.tensor[rows : self._num_dirty].fill_(self.spec.fill)
            self._num_dirty = rows
        else:
            self._num_dirty = max(self._num_dirty, rows)


class OutputBuffers:
    """The results of one callable, ``[M, *T]`` a field, written at the end of each of its graphs."""

    def __init__(self, results: Results, capacity: int) -> None:
        """Allocates one buffer a field of ``results``.

        Args:
            results: NamedTuple of tensors ``[B, *T]`` as the callable returned them.
            capacity: the largest bucket M.
        """
        self.kind: Any = type(results)
        self.layout = self.layout_of(results)
        with torch.inference_mode(False):
            self.tensors = tuple(each.new_empty((capacity, *each.shape[1:])).detach() for each in results)
        self._views: dict[int, Results] = {}

    @staticmethod
    def layout_of(results: Results) -> tuple[object, ...]:
        """The type of ``results`` with the tail and dtype of each field: equal for interchangeable callables."""
        return (type(results), *((tuple(each.shape[1:]), each.dtype) for each in results))

    def rows(self, rows: int) -> Results:
        """The NamedTuple of views ``[rows, *T]``, made once."""
        views = self._views.get(rows)
        if views is None:
            with torch.inference_mode(False):
                views = self._views[rows] = self.kind(*(each[:rows] for each in self.tensors))
        return views

    def store(self, results: Results, bucket: int) -> None:
        """Copies ``results`` (``[bucket, *T]`` a field) into the first ``bucket`` rows."""
        with torch.no_grad():
            copy_tensors(self.rows(bucket), results)

    def empty(self, rows: int) -> Results:
        """A NamedTuple of new uninitialised tensors ``[rows, *T]``."""
        made: Results = self.kind(*(each.new_empty((rows, *each.shape[1:])) for each in self.tensors))
        return made
