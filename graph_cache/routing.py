"""Which variant serves a batch: the ladder of buckets, the keys of variants, and which tensors come back."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

from torch import Tensor

from graph_cache.addresses import Binding
from graph_cache.registry import BufferSpec, Given, Registration, Results


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
    rows: int,
    matched: Mapping[str, Binding],
    candidates: Sequence[Registration],
    *,
    ladder: BucketLadder,
    prepared: Container[VariantKey],
) -> tuple[VariantKey | None, str | None]:
    """The key of the prepared variant that serves a batch, and the reason if it is not the one made for the batch.

    Variants are tried in this order: the smallest bucket, larger buckets, then the same of each further candidate. At
    each bucket the variant that reads the matched bindings in place comes first, then the one with owned buffers.

    Args:
        rows: rows of the batch R, at least 1.
        matched: the bindings that tensors of the batch match, by input.
        candidates: the callable of the batch, then those that cover it.
        ladder: the buckets.
        prepared: keys of the captured variants.

    Returns:
        The key (None for a direct call) and the reason (None if the variant was made for this batch).
    """
    bucket = ladder.bucket_for(rows)
    if bucket is None:
        return None, f"more rows than the largest bucket {ladder.largest}"
    name = candidates[0].name
    for candidate in candidates:
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


_FEW_BYTES = 64  # of which part of a batch's bytes is not worth a variant: a step number beside rows of logits
_MOST_BATCHES = 1024  # kept at once; a caller whose tensors never come back brings new ones with each run


class SeenBatches:
    """Counts of the runs since they were last forgotten: by how a batch lies in memory, and by variant."""

    def __init__(self) -> None:
        self._batches: Counter[Batch] = Counter()
        self._served: Counter[VariantKey] = Counter()

    def collect(self, routes: Iterable[Route]) -> None:
        """Add the counts of ``routes``, which stay as they are."""
        for route in routes:
            if route.seen is not None and route.count:
                self._batches[route.seen] += route.count
            if route.key is not None:
                self._served[route.key] += route.count
        if len(self._batches) > _MOST_BATCHES:
            self._batches = Counter(dict(self._batches.most_common(_MOST_BATCHES // 2)))

    def returning(self, at_least: int) -> list[VariantKey]:
        """The variants that read and write in place what came back, those of most runs first.

        A tensor comes back if it was the same argument of the same callable for as many rows in so many runs. Inputs
        that are few of the bytes of all make no variant by themselves: the others would be copied as before.

        Args:
            at_least: runs.
        """
        counts: Counter[tuple[str, int, object]] = Counter()
        for (name, rows, inputs, out), count in self._batches.items():
            for place in (*inputs, out):
                counts[name, rows, place] += count
        wanted: Counter[VariantKey] = Counter()
        for (name, rows, inputs, out), count in self._batches.items():
            binding = tuple(place for place in inputs if counts[name, rows, place] >= at_least)
            into = out if counts[name, rows, out] >= at_least else None
            if into or _FEW_BYTES * sum(place.nbytes for place in binding) > sum(place.nbytes for place in inputs):
                wanted[VariantKey(name, rows, binding or None, into, seen=True)] += count
        return [key for key, _ in wanted.most_common()]

    def least_served(self, keys: Iterable[VariantKey], number: int) -> list[VariantKey]:
        """The ``number`` variants among ``keys`` that served the fewest runs; none below 1."""
        return sorted(keys, key=lambda key: self._served[key])[: max(number, 0)]

    def forget(self) -> None:
        """Set every count to zero."""
        self._batches.clear()
        self._served.clear()


def in_place(batch: Batch, prepared: Iterable[VariantKey], chosen: VariantKey | None) -> VariantKey | None:
    """The variant that leaves the most bytes of a batch where they are; ``chosen`` if none leaves as many.

    Args:
        batch: under the name of the callable that serves it.
        prepared: the keys of the captured variants.
        chosen: the variant that serves the batch by its bucket; None for a direct call.
    """
    fits = [key for key in prepared if key.is_seen_for(batch)]
    best = max(fits, key=lambda key: _bytes_in_place(key, batch), default=None)
    if best is None or chosen is None:
        return best or chosen
    return best if _bytes_in_place(best, batch) >= _bytes_in_place(chosen, batch) else chosen


def _bytes_in_place(key: VariantKey, batch: Batch) -> int:
    names = {place.input_name for place in key.binding or ()}
    read = [place for place in batch.inputs if place.input_name in names]
    return sum(place.nbytes for place in (*read, *(key.out or ())))
