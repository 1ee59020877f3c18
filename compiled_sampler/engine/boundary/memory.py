"""The memory of tensors that take results: read from addresses and strides, so nothing waits for a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from torch import Tensor


class Span(NamedTuple):
    """The bytes of a tensor ``[rows, ...]``: one piece for each row."""

    start: int
    """Address of the first byte."""
    end: int
    """Address behind the last byte; ``start`` of an empty tensor."""
    step: int
    """Bytes from row to row."""
    width: int
    """Bytes from the first to the last of a row."""


def span(tensor: Tensor) -> Span:
    """The bytes of a tensor of one dimension or more."""
    start, size, strides, shape = tensor.data_ptr(), tensor.element_size(), tensor.stride(), tensor.shape
    if not tensor.numel():
        return Span(start, start, size, 0)
    step, width = strides[0] * size, size
    for length, stride in zip(shape[1:], strides[1:], strict=True):
        width += (length - 1) * stride * size
    return Span(start, start + (shape[0] - 1) * step + width, step, width)


def overlap(a: Span, b: Span) -> bool:
    """Whether two tensors share memory: exact for rows of equal distance, like the columns of one buffer.

    Tensors that lie across each other with rows of different distances count as shared.
    """
    if a.end <= b.start or b.end <= a.start or a.start == a.end or b.start == b.end:
        return False
    if a.step != b.step or not a.step:
        return True
    place = (b.start - a.start) % a.step
    return place < a.width or place + b.width > a.step


def check_apart(fields: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> None:
    """Raise unless every field of ``out`` has memory of its own.

    Args:
        fields: of ``out``, by name.
        inputs: of the call.

    Raises:
        ValueError: a field repeats its memory, or shares it with another field or with an input.
    """
    for name, tensor in fields.items():
        if 0 in tensor.stride() and _repeats(tensor):
            raise ValueError(
                f"out.{name} must not repeat its memory, got strides {tensor.stride()}; call .contiguous()"
            )
    storages = {each.untyped_storage().data_ptr() for each in (*fields.values(), *inputs)}
    if len(storages) == len(fields) + len(inputs):
        return
    spans = {name: span(tensor) for name, tensor in fields.items()}
    for (name, a), (other, b) in combinations(spans.items(), 2):
        if overlap(a, b):
            raise ValueError(f"out.{name} must have memory of its own, got that of out.{other}; allocate each field")
    read = [span(each) for each in inputs]
    for name, a in spans.items():
        if any(overlap(a, b) for b in read):
            raise ValueError(f"out.{name} must have memory of its own, got that of an input; allocate each field")


def _repeats(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory because it was expanded."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
