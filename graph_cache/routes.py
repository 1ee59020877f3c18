"""The routes of batches, which variant serves each, and the counts of all runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from graph_cache.buffers import copy_tensors
from graph_cache.capture import Variant
from graph_cache.keys import Binding, BucketLadder, OutBinding, VariantKey, keys_of
from graph_cache.mirror import HostMirror
from graph_cache.registry import (
    Given,
    Registration,
    Registry,
    Results,
    check_out,
    check_results,
    first_rows,
    rows_used,
    tensor_of,
)

Run = Callable[[Mapping[str, Given], int, Results | None], Results]
"""``run(tensors, R, out)``: the results of a batch, in ``out`` unless that is None."""


@dataclass(slots=True)
class Route:
    """How batches of one callable are served, and how many of them were."""

    label: str  # ``"name rows=R"``
    key: VariantKey | None  # None for a direct call of the callable
    reason: str | None  # why the variant made for such a batch does not serve it; None if it does, or if none is wanted
    serve: Run
    count: int = 0  # since the counts were last collected

    def run(self, tensors: Mapping[str, Given], rows: int, out: Results | None) -> Results:
        """The results of a batch that fits the route, in ``out`` unless that is None; served batches are counted."""
        results = self.serve(tensors, rows, out)
        self.count += 1
        return results


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
        coverage: all runs, under ``"name rows=R -> variant[P]"`` or ``"name rows=R -> direct"``.
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


class Batch(NamedTuple):
    """What decides how a batch is served."""

    name: str  # the registered callable
    rows: int  # R
    bound: tuple[str, ...]  # the inputs that it brings where they are bound
    has_bound_out: bool  # whether its ``out`` is what is bound
    is_direct: bool  # whether no variant may serve it: without a backend, or while somebody else captures
    is_exact: bool  # whether no callable that covers another may serve it
    is_copied: bool  # whether its tensors are so large that a direct call takes less time than copies of them


_MOST_ROUTES = 4096  # kept at once: callables times numbers of rows


class Routes:
    """The routes of batches, each chosen when such a batch comes for the first time; and the counts of their runs."""

    def __init__(
        self,
        registry: Registry,
        ladder: BucketLadder,
        variants: Mapping[VariantKey, Variant],
        device: torch.device,
        mirror: HostMirror | None,
    ) -> None:
        self._mirror = mirror
        self._registry, self._ladder, self._variants, self._device = registry, ladder, variants, device
        self._routes: dict[Batch, Route] = {}  # saves 16 us of a run; the checks before it take 8
        self.generation = 0  # changes when all routes are forgotten
        self.reset_counts()

    def of(self, batch: Batch, bindings: Mapping[str, Binding], outs: Mapping[str, OutBinding]) -> Route:
        """The route of a batch, for what is bound now by input and, of results, by callable."""
        route = self._routes.get(batch)
        if route is None:
            if len(self._routes) >= _MOST_ROUTES:
                self.forget()
            route = self._routes[batch] = self._new(batch, bindings, outs)
        return route

    def forget(self) -> None:
        """Forget all routes, since variants or bindings changed; their counts are kept."""
        self.generation += 1
        self.collect_counts()
        self._routes.clear()

    def collect_counts(self) -> None:
        """Bring the counts up to date: add those of the routes, and set these to zero."""
        for route in self._routes.values():
            count, route.count = route.count, 0
            if not count:
                continue
            if route.key is None:
                self.direct_runs += count
            else:
                self.replays += count
            self.coverage[f"{route.label} -> {route.key or 'direct'}"] += count
            if route.reason is not None:
                self.fallbacks[f"{route.label}: {route.reason}"] += count

    def reset_counts(self) -> None:
        """Set all counts to zero; ``CacheStatistics`` says what they are."""
        self.replays = self.direct_runs = 0
        self.coverage, self.fallbacks = Counter[str](), Counter[str]()
        for route in self._routes.values():
            route.count = 0

    def _new(self, batch: Batch, bindings: Mapping[str, Binding], outs: Mapping[str, OutBinding]) -> Route:
        name, rows, key, reason = batch.name, batch.rows, None, None
        registration = self._registry.named(name)
        if rows > 0 and not batch.is_direct:
            matched = {bound: bindings[bound] for bound in batch.bound}
            outs = {other: out for other, out in outs.items() if batch.has_bound_out and out == outs[name]}
            key, reason = self._variant_for(batch, registration, matched, outs)
            if key is not None and key.name == name and batch.is_copied:
                key, reason = None, "a direct call takes less time than copies of its tensors"
        direct: Run = partial(_call, registration, self._device, self._mirror)
        return Route(f"{name} rows={rows}", key, reason, direct if key is None else self._variants[key].run)

    def _variant_for(
        self,
        batch: Batch,
        registration: Registration,
        matched: Mapping[str, Binding],
        outs: Mapping[str, OutBinding],
    ) -> tuple[VariantKey | None, str | None]:
        """The key of the variant that serves a batch, None for a direct call; and why its own does not."""
        # Variants are tried in this order: the smallest bucket, larger buckets, then the same of each callable that
        # covers that of the batch. At each bucket the variant that works on the matched bindings in place comes first,
        # then those with owned buffers.
        name, rows = batch.name, batch.rows
        bucket = self._ladder.bucket_for(rows)
        if bucket is None:
            return None, f"more rows than the largest bucket {self._ladder.largest}"
        wanted = keys_of(name, registration.inputs, matched, outs.get(name), bucket)[0]
        for candidate in (registration, *(() if batch.is_exact else self._registry.covering(name))):
            inputs = candidate.inputs
            # Bound inputs of the host say which rows are of requests: rows behind the batch might be live there.
            certain = {key: binding for key, binding in matched.items() if key in inputs and not inputs[key].on_host}
            for size in self._ladder.at_least(rows):
                here = matched if size == rows else certain
                keys = keys_of(candidate.name, inputs, here, outs.get(candidate.name), size)
                for key in dict.fromkeys((*keys, VariantKey(candidate.name, size))):
                    if key in self._variants:
                        return key, _reason(key, wanted)
        return None, "no variant"


def _reason(taken: VariantKey, wanted: VariantKey) -> str | None:
    if taken.name != wanted.name:
        return f"covered by {taken.name}[{taken.rows}]"
    if taken.rows != wanted.rows:
        return f"larger bucket {taken.rows}"
    return None if taken == wanted else "copied, the bound variant is missing"


def copied_bytes(registration: Registration, given: Mapping[str, Given], rows: int, bound: Container[str]) -> int:
    """Bytes that a replay would copy of tensors that lie in memory as owned buffers do, else 0."""
    # For other tensors the callable may have to be compiled, and a replay is better whatever it copies.
    copied = 0
    for name, tensor in given.items():
        spec = registration.inputs[name]
        if not isinstance(tensor, Tensor) or not tensor.numel():
            continue
        row = math.prod(spec.shape)
        if row > 1 and (tensor.shape[1:] != spec.shape or tensor.stride(0) != row or tensor.stride(-1) != 1):
            return 0
        if name not in bound:
            copied += min(tensor.shape[0], rows * spec.times) * row * tensor.dtype.itemsize
    return copied


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
    inputs = {}
    for name, spec in registration.inputs.items():
        given = tensors[name]
        whole = given if isinstance(given, Tensor) else tensor_of(given, spec.dtype).to(device)
        inputs[name] = first_rows(whole, rows_used(whole, spec, rows), spec.shape)
    results = registration.fn(**inputs)
    check_results(results, rows, device)
    if out is None:
        return results
    check_out(out, results)
    copy_tensors(out, results)
    return out
