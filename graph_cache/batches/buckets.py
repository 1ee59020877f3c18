"""The ladder of row counts that variants are captured with."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral


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
