"""Counts of the captures, replays and fallbacks of a cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from graph_cache.batches.routing import Route


@dataclass(frozen=True)
class CacheStatistics:
    """The counts of a cache since its last reset, and the memory that it holds now.

    Attributes:
        variants: graphs held now.
        captures: graphs captured.
        replays: runs served by a graph.
        direct_runs: runs served by the callable itself.
        evictions: graphs removed.
        fallbacks: runs not served by the variant made for them, under ``"name rows=R: reason"``.
        coverage: all runs, under ``"name rows=R -> variant[B]"`` or ``"name rows=R -> direct"``.
        pool_bytes: device memory held by the graph pool.
        buffer_bytes: device memory of the owned inputs and outputs.
    """

    variants: int
    captures: int
    replays: int
    direct_runs: int
    evictions: int
    fallbacks: dict[str, int]
    coverage: dict[str, int]
    pool_bytes: int
    buffer_bytes: int


class Counters:
    """Counts since the last reset; routes count their runs, and the counts are collected here."""

    def __init__(self) -> None:
        """Start every count at zero."""
        self.captures = 0
        self.evictions = 0
        self._replays = 0
        self._direct_runs = 0
        self._fallbacks: Counter[str] = Counter()
        self._coverage: Counter[str] = Counter()

    def collect(self, routes: Iterable[Route]) -> None:
        """Add the counts of ``routes``, and set those to zero."""
        for route in routes:
            count, route.count = route.count, 0
            if not count:
                continue
            if route.key is None:
                self._direct_runs += count
            else:
                self._replays += count
            self._coverage[f"{route.request} -> {route.server}"] += count
            if route.reason is not None:
                self._fallbacks[f"{route.request}: {route.reason}"] += count

    def snapshot(self, *, variants: int, pool_bytes: int, buffer_bytes: int) -> CacheStatistics:
        """The counts as a record, with the given numbers of variants and bytes."""
        return CacheStatistics(
            variants=variants,
            captures=self.captures,
            replays=self._replays,
            direct_runs=self._direct_runs,
            evictions=self.evictions,
            fallbacks=dict(self._fallbacks),
            coverage=dict(self._coverage),
            pool_bytes=pool_bytes,
            buffer_bytes=buffer_bytes,
        )
