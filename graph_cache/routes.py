"""The routes that batches take, kept for later batches that lie in memory as they did, and the counts of all runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from graph_cache.addresses import Binding
from graph_cache.copies import copy_tensors
from graph_cache.mirror import HostMirror
from graph_cache.registry import Given, Registration, Registry, Results, check_out
from graph_cache.routing import Batch, BucketLadder, Route, Run, SeenBatches, VariantKey, choose, in_place
from graph_cache.variants import Variants


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


_MOST_ROUTES = 512  # kept at once; tensors that never come back bring a new one with each run


class Routes:
    """The routes of batches, each chosen when such a batch comes for the first time.

    Args:
        registry: the callables.
        ladder: the buckets.
        variants: those held.
        device: of all tensors.
        mirror: of what the host writes; None without one.

    Attributes:
        generation: changes when all routes are forgotten.
        counters: of runs, captures and evictions.
        seen: counts of batches by how they lie in memory.
    """

    def __init__(
        self,
        registry: Registry,
        ladder: BucketLadder,
        variants: Variants,
        device: torch.device,
        mirror: HostMirror | None,
    ) -> None:
        self._mirror = mirror
        self._registry, self._ladder, self._variants, self._device = registry, ladder, variants, device
        self._routes: dict[tuple[Batch, bool, bool], Route] = {}
        self.generation = 0
        self.counters = Counters()
        self.seen = SeenBatches()

    def of(self, batch: Batch, matched: Mapping[str, Binding], capturing: bool, is_exact: bool) -> Route:
        """The route of a batch.

        Args:
            batch: how it lies in memory.
            matched: the bindings that its tensors match, by input.
            capturing: whether the current stream is being captured, so that the callable itself is called.
            is_exact: whether no callable that covers another may serve it.
        """
        key = batch, capturing, is_exact
        known = self._routes.get(key)
        if known is not None:
            return known
        if len(self._routes) >= _MOST_ROUTES:
            self.forget()
        made = self._new(batch, {} if capturing else matched, batch.rows > 0 and not capturing, is_exact)
        self._routes[key] = made
        return made

    def forget(self) -> None:
        """Forget all routes, since variants or bindings changed; their counts are kept."""
        self.generation += 1
        self.counted()
        self._routes.clear()

    def counted(self) -> Counters:
        """The counters, up to date."""
        self.seen.collect(self._routes.values())
        self.counters.collect(self._routes.values())
        return self.counters

    def reset_counters(self) -> None:
        """Set all counters to zero; what was seen stays."""
        self.counted()
        self.counters = Counters()

    def _new(self, batch: Batch, matched: Mapping[str, Binding], replays: bool, is_exact: bool) -> Route:
        name, rows, key, reason, seen = batch.name, batch.rows, None, None, None
        if replays and self._variants.backend is not None:
            covering = () if is_exact else self._registry.covering(name)
            candidates = (self._registry.named(name), *covering)
            key, reason = choose(rows, matched, candidates, ladder=self._ladder, prepared=self._variants)
            seen = batch if key is None else batch._replace(name=key.name)
            key = in_place(seen, self._variants, key)
            if key is not None and key.name == name and self._is_faster_direct(batch, key):
                key, reason = None, "a direct call takes less time than copies of its tensors"
        direct: Run = partial(_call, self._registry.named(name), self._device, self._mirror)
        serve = direct if key is None else self._variants[key].run
        return Route(f"{name} rows={rows}", key, reason, serve, seen)

    def _is_faster_direct(self, batch: Batch, key: VariantKey) -> bool:
        """Whether so much would be copied for a replay that a direct call takes less time.

        Only for tensors that lie in memory as owned buffers do: for others the callable may have to be compiled.
        """
        registration, copied = self._registry.named(batch.name), 0
        in_place = {place.input_name for place in key.binding or ()}
        for place in batch.inputs:
            spec = registration.inputs[place.input_name]
            row = math.prod(spec.shape)
            if row > 1 and (place.shape[1:] != spec.shape or place.strides[0] != row or place.strides[-1] != 1):
                return False
            if place.input_name not in in_place:
                copied += min(place.shape[0], batch.rows * spec.times) * row * place.dtype.itemsize
        return copied > registration.most_copied


def _call(
    registration: Registration,
    device: torch.device,
    mirror: HostMirror | None,
    tensors: Mapping[str, Given],
    rows: int,
    out: Results | None,
) -> Results:
    """The results of a direct call. No method: a route that holds this function must not keep the cache alive."""
    if mirror is not None:
        mirror.upload()
    results = registration.call(tensors, rows, device)
    if out is None:
        return results
    check_out(out, results)
    copy_tensors(out, results)
    return out
