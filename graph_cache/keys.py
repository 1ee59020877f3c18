"""The keys of variants: the ladder of buckets, and the caller's tensors that a variant reads and writes in place."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from graph_cache.registry import BufferSpec, Given, Results

_FEW = 64  # numbers of a row that are copied in a launch with others
OUT = "out"  # stands for results among names of inputs


@dataclass(frozen=True)
class Binding:
    """The identity of a caller's tensor that variants read or write in place."""

    input_name: str  # ``OUT`` for results
    data_ptr: int
    shape: tuple[int, ...]  # ``(rows, *tail)``
    strides: tuple[int, ...]  # in elements
    dtype: torch.dtype

    @classmethod
    def of(cls, input_name: str, tensor: Tensor) -> Binding:
        """The identity of ``tensor`` (``[rows, *tail]``, any strides), bound to ``input_name``."""
        return cls(input_name, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def matches(self, tensor: Given | None) -> bool:
        """Whether ``tensor`` has this address, dtype and strides, so that its rows are rows of the bound tensor."""
        if not isinstance(tensor, Tensor) or tensor.data_ptr() != self.data_ptr:
            return False
        return tensor.dtype is self.dtype and tensor.stride() == self.strides


OutBinding = tuple[Binding | None, ...]  # the caller's tensors for the fields of results; None for a field that is None


def out_matches(bound: OutBinding, out: Results | None) -> bool:
    """Whether the fields of ``out`` are rows of the bound tensors."""
    if out is None or len(out) != len(bound):
        return False
    pairs = zip(bound, out, strict=True)
    return all(field is None if place is None else place.matches(field) for place, field in pairs)


@dataclass(frozen=True)
class BucketLadder:
    """The buckets of a cache.

    Attributes:
        sizes: row counts of at least 1, ascending and without repeats; not empty.
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Iterable[int]) -> BucketLadder:
        """The ladder of ``sizes``, which may be in any order and repeated.

        Raises:
            TypeError: no iterable, or a text.
            ValueError: no size, or one that is not an integer of at least 1, of Python or numpy.
        """
        if isinstance(sizes, str | bytes) or not isinstance(sizes, Iterable):
            raise TypeError(f"buckets must be one or more integers >= 1, got {sizes!r}; for example (1, 2, 4, 8)")
        ladder = list(sizes)
        wrong = [size for size in ladder if not isinstance(size, Integral) or isinstance(size, bool) or size < 1]
        if wrong or not ladder:
            raise ValueError(f"buckets must be one or more integers >= 1, got {ladder}; for example (1, 2, 4, 8)")
        return cls(tuple(sorted({int(size) for size in ladder})))

    @classmethod
    def doubling(cls, largest: int) -> BucketLadder:
        """The ladder of the powers of two below ``largest``, and ``largest``."""
        return cls.of([1 << i for i in range(largest.bit_length()) if 1 << i < largest] + [largest])

    @property
    def largest(self) -> int:
        """The largest bucket M."""
        return self.sizes[-1]

    def at_least(self, rows: int) -> tuple[int, ...]:
        """The buckets of at least ``rows`` rows, smallest first."""
        return self.sizes[bisect_left(self.sizes, rows) :]

    def bucket_for(self, rows: int) -> int | None:
        """The smallest bucket of at least ``rows`` rows; None if ``rows`` exceeds the largest bucket."""
        index = bisect_left(self.sizes, rows)
        return self.sizes[index] if index < len(self.sizes) else None

    def chosen(self, sizes: Iterable[int] | None) -> tuple[int, ...]:
        """The given buckets, ascending and without repeats, or all of them for None.

        Raises:
            ValueError: a size that is no bucket of this ladder.
        """
        wanted = sorted(set(self.sizes if sizes is None else sizes))
        if unknown := [size for size in wanted if size not in self.sizes]:
            raise ValueError(f"buckets must be among {self.sizes}, got {unknown}; build the ladder with them")
        return tuple(wanted)


@dataclass(frozen=True)
class VariantKey:
    """The key of one captured graph.

    Attributes:
        name: the registered callable.
        rows: its bucket P.
        binding: the caller's tensors that it reads in place; None if all its inputs are owned buffers.
        out: the caller's tensors that it writes in place; None for owned buffers.
    """

    name: str
    rows: int
    binding: tuple[Binding, ...] | None = None
    out: OutBinding | None = None

    def __str__(self) -> str:
        """``greedy[4]``, or ``greedy[4] bound to logits, out``."""
        names = [binding.input_name for binding in self.binding or ()] + [OUT] * (self.out is not None)
        label = f"{self.name}[{self.rows}]"
        return f"{label} bound to {', '.join(names)}" if names else label


def keys_of(
    name: str, inputs: Mapping[str, BufferSpec], bindings: Mapping[str, Binding], out: OutBinding | None, bucket: int
) -> list[VariantKey]:
    """The keys under which tensors with such bindings are served at a bucket, those with the fewest copies first."""
    # A variant works in place on all that is bound. One without out serves batches that want new results, and where a
    # batch brings few numbers a row elsewhere, they are copied, and one that is bound to the long rows alone serves it.
    bound = [(bindings[key], spec) for key, spec in inputs.items() if key in bindings]
    usable = tuple(binding for binding, spec in bound if binding.shape[0] >= bucket * spec.times) or None
    if out is not None and any(place is not None and place.shape[0] < bucket for place in out):
        out = None
    long = tuple(place for place in usable or () if math.prod(inputs[place.input_name].shape) > _FEW) or None
    keys = VariantKey(name, bucket, usable, out), VariantKey(name, bucket, usable), VariantKey(name, bucket, long)
    return list(dict.fromkeys(keys))
