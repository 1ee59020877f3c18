"""Keys of captured variants, and the route that a batch takes: which variant serves it, or a direct call."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graph_cache.batches.buckets import BucketLadder
from graph_cache.batches.registry import BufferSpec, Given, Registry, Results


@dataclass(frozen=True)
class Binding:
    """The identity of a caller's tensor that variants read in place.

    Attributes:
        input_name: the input that the tensor is bound to.
        data_ptr: address of element 0.
        shape: ``(rows, *tail)``.
        strides: in elements.
        dtype: element type.
    """

    input_name: str
    data_ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, input_name: str, tensor: Tensor) -> Binding:
        """The identity of ``tensor`` (``[rows, *tail]``, any strides), bound to ``input_name``."""
        return cls(input_name, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def matches(self, tensor: Given) -> bool:
        """Whether ``tensor`` has this address, dtype and strides, so that its rows are rows of the bound tensor."""
        if not isinstance(tensor, Tensor) or tensor.data_ptr() != self.data_ptr:
            return False
        return tensor.dtype is self.dtype and tensor.stride() == self.strides


class Batch(NamedTuple):
    """How the tensors of a run lie in memory."""

    name: str
    """The registered callable."""
    rows: int
    """R."""
    inputs: tuple[Binding, ...]
    """The tensors that a graph may read in place."""
    out: tuple[Binding, ...] | None
    """The fields of the caller's ``out``, by index; None for new tensors."""

    @classmethod
    def of(
        cls, name: str, rows: int, given: Mapping[str, Given], bound: Mapping[str, Binding], out: Results | None
    ) -> Batch:
        """How the tensors of a run and ``out`` lie in memory; bytes and tensors without elements lie nowhere.

        Args:
            name: of the callable.
            rows: R.
            given: to the run, by input.
            bound: the bindings that tensors match and that have enough rows; they stand for those tensors.
            out: of the run.
        """
        filled = ((each, t) for each, t in given.items() if isinstance(t, Tensor) and t.numel())
        inputs = tuple(bound.get(each) or Binding.of(each, tensor) for each, tensor in filled)
        fields = enumerate(out or ())
        into = tuple(Binding.of(f"out {i}", each) for i, each in fields if isinstance(each, Tensor))
        return cls(name, rows, inputs, into or None)


@dataclass(frozen=True)
class VariantKey:
    """The key of one captured graph.

    Attributes:
        name: the registered callable.
        rows: its bucket B; of a seen variant the rows R of the batches that it serves.
        binding: the caller's tensors that it reads in place; None if all its inputs are owned buffers.
        out: the caller's tensors that it writes in place; None for owned buffers.
        seen: whether it was captured for batches that were seen, whose tensors have exactly its rows.
    """

    name: str
    rows: int
    binding: tuple[Binding, ...] | None = None
    out: tuple[Binding, ...] | None = None
    seen: bool = False

    def is_seen_for(self, batch: Batch) -> bool:
        """Whether it was captured for such a batch: all that it reads and writes in place is where it was."""
        is_same = self.seen and self.name == batch.name and self.rows == batch.rows and self.out in (None, batch.out)
        return is_same and set(self.binding or ()) <= set(batch.inputs)

    def __str__(self) -> str:
        """``greedy[4]``, ``greedy[4] bound to logits``, or ``greedy[4] seen with logits, out``."""
        names = [each.input_name for each in self.binding or ()] + ["out"] * (self.out is not None)
        label = f"{self.name}[{self.rows}]"
        return f"{label} {'seen with' if self.seen else 'bound to'} {', '.join(names)}" if names else label


def usable_bindings(
    inputs: Mapping[str, BufferSpec], bindings: Mapping[str, Binding], bucket: int
) -> tuple[Binding, ...] | None:
    """The bindings of ``inputs`` that have enough rows for ``bucket``, in the order of ``inputs``; None for none."""
    bound = ((name, spec) for name, spec in inputs.items() if name in bindings)
    names = [name for name, spec in bound if bindings[name].shape[0] >= bucket * spec.times]
    return tuple(bindings[name] for name in names) or None


Run = Callable[[Mapping[str, Given], int, Results | None], Results]
"""``run(tensors, R, out)``: the results of a batch, in ``out`` unless that is None."""


@dataclass(slots=True)
class Route:
    """How batches of one callable that lie alike in memory are served, and how many of them were.

    Attributes:
        request: ``"name rows=R"``.
        key: of the variant that is replayed; None for a direct call of the callable.
        reason: why the variant made for such a batch does not serve it; None if it does, or if none is wanted.
        serve: the replay or the direct call.
        seen: how its batches lie in memory, under the name of the callable that serves them; None inside a capture.
        count: batches served since the counts were last collected.
    """

    request: str
    key: VariantKey | None
    reason: str | None
    serve: Run
    seen: Batch | None = None
    count: int = 0

    def run(self, tensors: Mapping[str, Given], rows: int, out: Results | None) -> Results:
        """The results of a batch that fits the route, in ``out`` unless that is None; served batches are counted."""
        results = self.serve(tensors, rows, out)
        self.count += 1
        return results

    @property
    def server(self) -> str:
        """``"greedy[4]"`` or ``"direct"``."""
        return "direct" if self.key is None else str(self.key)


def choose(
    name: str,
    rows: int,
    matched: Mapping[str, Binding],
    *,
    ladder: BucketLadder,
    registry: Registry,
    prepared: Container[VariantKey],
) -> tuple[VariantKey | None, str | None]:
    """The key of the prepared variant that serves a batch, and the reason if it is not the one made for the batch.

    Variants are tried in this order: the smallest bucket, larger buckets, then the same of each callable that covers
    ``name``, in order of registration. At each bucket the variant that reads the matched bindings in place comes
    first, then the one with owned buffers.

    Args:
        name: a registered callable.
        rows: rows of the batch R, at least 1.
        matched: the bindings that tensors of the batch match, by input.
        ladder: the buckets.
        registry: the callables.
        prepared: keys of the captured variants.

    Returns:
        The key (None for a direct call) and the reason (None if the variant was made for this batch).
    """
    bucket = ladder.bucket_for(rows)
    if bucket is None:
        return None, f"more rows than the largest bucket {ladder.largest}"
    for candidate in (registry.named(name), *registry.covering(name)):
        for size in ladder.at_least(rows):
            bound = usable_bindings(candidate.inputs, matched, size)
            for binding in dict.fromkeys((bound, None)):
                key = VariantKey(candidate.name, size, binding)
                if key in prepared:
                    return key, _reason(key, VariantKey(name, bucket, bound))
    return None, "no variant"


def _reason(taken: VariantKey, wanted: VariantKey) -> str | None:
    if taken.name != wanted.name:
        return f"covered by {taken.name}[{taken.rows}]"
    if taken.rows != wanted.rows:
        return f"larger bucket {taken.rows}"
    return None if taken.binding == wanted.binding else "copied, the bound variant is missing"
