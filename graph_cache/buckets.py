"""The ladder of row counts that variants are captured with."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class BucketLadder:
    """Row counts, ascending and without repeats.

    Attributes:
        sizes: at least one, each at least 1.
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Iterable[int]) -> BucketLadder:
        """The ladder of ``sizes``, given in any order and with repeats.

        Raises:
            ValueError: no size, or one that is not an integer of at least 1.
        """
        ladder = list(sizes)
        wrong = [size for size in ladder if not isinstance(size, int) or isinstance(size, bool) or size < 1]
        if wrong or not ladder:
            raise ValueError(f"buckets must be one or more integers >= 1, got {ladder}; for example (1, 2, 4, 8)")
        return cls(tuple(sorted(set(ladder))))

    @classmethod
    def doubling(cls, largest: int) -> BucketLadder:
        """The powers of two below ``largest``, and ``largest``."""
        return cls.of([1 << i for i in range(largest.bit_length()) if 1 << i < largest] + [largest])

    @property
    def largest(self) -> int:
        """The largest bucket M."""
        return self.sizes[-1]

    def at_least(self, rows: int) -> tuple[int, ...]:
        """The buckets that hold ``rows``, smallest first."""
        return self.sizes[bisect_left(self.sizes, rows) :]

    def bucket_for(self, rows: int) -> int | None:
        """The smallest bucket that holds ``rows``; None when ``rows`` exceeds the largest."""
        index = bisect_left(self.sizes, rows)
        return self.sizes[index] if index < len(self.sizes) else None

    def chosen(self, sizes: Iterable[int] | None) -> tuple[int, ...]:
        """The given buckets, ascending and without repeats, or all of them.

        Raises:
            ValueError: one is not of this ladder.
        """
        wanted = sorted(set(self.sizes if sizes is None else sizes))
        if unknown := [size for size in wanted if size not in self.sizes]:
            raise ValueError(f"buckets must be among {self.sizes}, got {unknown}; build the ladder with them")
        return tuple(wanted)
