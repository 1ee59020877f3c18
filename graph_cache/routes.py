"""Which variant serves a batch."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from graph_cache.buckets import BucketLadder
from graph_cache.key import Binding, VariantKey, usable_bindings
from graph_cache.registry import Registry
from graph_cache.variant import Variant


@dataclass(slots=True)
class Route:
    """How batches of one callable and row count are served, and how many were.

    Attributes:
        request: ``"name rows=R"``.
        variant: the graph, or None for a direct call.
        reason: why the variant made for the batch does not serve it; None when it does, or when none is wanted.
        count: runs that took this route since the counts were last collected.
    """

    request: str
    variant: Variant | None
    reason: str | None
    count: int = 0

    @property
    def server(self) -> str:
        """``"greedy[4]"`` or ``"direct"``."""
        return "direct" if self.variant is None else str(self.variant.key)


def choose(
    name: str,
    rows: int,
    matched: Mapping[str, Binding],
    *,
    ladder: BucketLadder,
    registry: Registry,
    prepared: Container[VariantKey],
) -> tuple[VariantKey | None, str | None]:
    """The prepared variant that serves a batch, and why it is not the one made for it.

    In this order: the smallest bucket, larger buckets, the callables that cover ``name`` as they were registered;
    at each bucket first the variant that reads the matched bindings in place, then the one with owned buffers.

    Args:
        name: a registered callable.
        rows: rows of the batch, at least 1.
        matched: bindings that the tensors of the batch are.
        ladder: the buckets.
        registry: the callables.
        prepared: keys of the captured variants.

    Returns:
        The key (None for a direct call) and the reason (None when the variant was made for this batch).
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
