"""What was seen in runs: the tensors that come back, and the variants that would read and write them in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from graph_cache.batches.routing import Batch, Route, VariantKey

_FEW_BYTES = 64  # of which part of a batch's bytes is not worth a variant: a step number beside rows of logits
_MOST_BATCHES = 1024  # kept at once; a caller whose tensors never come back brings new ones with each run


class SeenBatches:
    """Counts of the runs since they were last forgotten: by how a batch lies in memory, and by variant."""

    def __init__(self) -> None:
        """Start every count at zero."""
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
        found: Counter[tuple[str, int, object]] = Counter()
        for (name, rows, inputs, out), count in self._batches.items():
            for each in (*inputs, out):
                found[name, rows, each] += count
        wanted: Counter[VariantKey] = Counter()
        for (name, rows, inputs, out), count in self._batches.items():
            binding = tuple(each for each in inputs if found[name, rows, each] >= at_least)
            into = out if found[name, rows, out] >= at_least else None
            if into or _FEW_BYTES * sum(each.nbytes for each in binding) > sum(each.nbytes for each in inputs):
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
    names = {each.input_name for each in key.binding or ()}
    left = [each for each in batch.inputs if each.input_name in names]
    return sum(each.nbytes for each in (*left, *(key.out or ())))
