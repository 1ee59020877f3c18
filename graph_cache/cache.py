"""The cache: it registers callables, captures their variants and runs batches through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from graph_cache.buckets import BucketLadder
from graph_cache.buffers import StaticTensors
from graph_cache.capture import CaptureBackend, CudaBackend, Variant, capture_variant
from graph_cache.copies import copy_tensors
from graph_cache.registry import BufferSpec, Registration, Registry, Results
from graph_cache.routing import Route, Run, VariantKey, choose, usable_bindings
from graph_cache.statistics import CacheStatistics, Counters
from graph_cache.validation import check_out, checked_rows

Out = TypeVar("Out", bound=tuple[Tensor, ...])
Progress = Callable[[int, int, str], object]


class GraphCache:
    """Captured variants of registered callables, and the static buffers that they share.

    Use it from one thread and one stream at a time: runs share static buffers and are ordered by the stream alone.

    Args:
        device: of all tensors.
        buckets: the row counts that variants are captured with, in any order.
        backend: captures the variants; None for CUDA graphs on a CUDA device and direct calls elsewhere.

    Raises:
        ValueError: no bucket, or one below 1.
    """

    def __init__(
        self, device: torch.device | str, buckets: Iterable[int], *, backend: CaptureBackend | None = None
    ) -> None:
        """Create an empty cache; nothing is allocated."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.ladder = BucketLadder.of(buckets)
        self._backend = CudaBackend(device) if backend is None and device.type == "cuda" else backend
        self._registry = Registry()
        self._statics = StaticTensors(self._registry, self.ladder.largest, device)
        self._variants: dict[VariantKey, Variant] = {}
        self._routes: dict[tuple[str, int, tuple[str, ...], bool], Route] = {}
        self._counters = Counters()
        self.generation = 0

    def register(
        self, name: str, fn: Callable[..., Any], inputs: Mapping[str, BufferSpec], *, covers: Sequence[str] = ()
    ) -> None:
        """Register ``fn`` under ``name``.

        Args:
            name: unique; ``run`` takes it.
            fn: ``fn(**tensors) -> NamedTuple of tensors``, see the contract in the package's docstring.
            inputs: the layout of each keyword; callables that share an input name share its buffer.
            covers: callables registered before, whose results this one gives too, bit for bit and in the same
                NamedTuple type, if the inputs that they lack hold their fill.

        Raises:
            ValueError: a name taken, no input, an input with another layout than before, an unknown covered name.
        """
        self._registry.add(name, fn, inputs, covers)

    def bind(self, input_name: str, tensor: Tensor) -> None:
        """Let variants that are captured from now on read ``tensor`` in place; a reference to it is kept.

        Its rows after the batch are read too, whatever they hold. Buckets of more rows than it has use owned buffers.

        Args:
            input_name: an input of a registered callable.
            tensor: ``[rows, >= tail...]``, any strides.

        Raises:
            TypeError: no tensor, or another dtype.
            ValueError: an unknown input, another device, a shorter tail.
        """
        self._statics.bind(input_name, tensor)
        self._forget_routes()

    def unbind(self, input_name: str) -> None:
        """Drop the binding and its reference; variants that read the tensor stay, unused, until they are evicted.

        Raises:
            ValueError: the input is unknown or not bound.
        """
        self._statics.unbind(input_name)
        self._forget_routes()

    def input_buffer(self, input_name: str) -> Tensor:
        """The owned buffer ``[M * times, *T]`` of an input; a batch in its first rows is run without a copy.

        A view that starts at another row of it must not be passed to ``run``, which would copy it onto itself.

        Raises:
            ValueError: an unknown input.
        """
        return self._statics.owned(input_name).tensor

    def warmup(
        self,
        names: Iterable[str] | None = None,
        buckets: Iterable[int] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Capture every variant that is not held yet, the largest bucket first.

        A bound tensor with enough rows for the bucket is read in place; every other input gets an owned buffer.

        Args:
            names: registered callables; None for all.
            buckets: of the ladder; None for all.
            progress: called after each capture as ``progress(done, total, label)``.

        Raises:
            CaptureError: a callable failed; variants captured before it stay, a later warmup tries again.
            RuntimeError: the current stream is being captured.
            ValueError: an unknown name or bucket.
        """
        chosen, sizes = self._registry.chosen(names), self.ladder.chosen(buckets)
        if self._backend is None:
            return
        if self._backend.capturing():
            raise RuntimeError("warmup must not run inside a capture; call it before the outer capture begins")
        planned = [
            VariantKey(each.name, size, usable_bindings(each.inputs, self._statics.bindings, size))
            for size in reversed(sizes)
            for each in chosen
        ]
        missing = [key for key in dict.fromkeys(planned) if key not in self._variants]
        for done, key in enumerate(missing, start=1):
            self._variants[key] = capture_variant(key, self._registry.named(key.name), self._statics, self._backend)
            self._counters.captures += 1
            self._forget_routes()
            if progress is not None:
                progress(done, len(missing), str(key))

    @overload
    def run(self, name: str, tensors: Mapping[str, Tensor], *, rows: int | None = None, out: Out) -> Out: ...

    @overload
    def run(self, name: str, tensors: Mapping[str, Tensor], *, rows: int | None = None, out: None = None) -> Any: ...

    def run(
        self, name: str, tensors: Mapping[str, Tensor], *, rows: int | None = None, out: Results | None = None
    ) -> Any:
        """The callable's results for a batch, by replay of a variant if one can serve it.

        While the current stream is being captured, and for a batch without rows, the callable itself is called. A
        replay with ``out`` neither allocates device memory nor waits for the device.

        Args:
            name: a registered callable.
            tensors: ``[R, >= tail...]`` each, any strides; with ``rows`` given, more rows are allowed.
            rows: number of rows R to use, the first ones; None for all.
            out: NamedTuple as the callable returns it, of ``[R, *T]`` tensors that take the results.

        Returns:
            ``out``, or the callable's NamedTuple of new tensors ``[R, *T]``.

        Raises:
            TypeError: wrong types or dtypes.
            ValueError: unknown names; shapes, rows or devices that do not fit.
        """
        route, rows = self.route(name, tensors, rows=rows, out=out)
        return route.run(tensors, rows, out)

    def route(
        self, name: str, tensors: Mapping[str, Tensor], *, rows: int | None = None, out: Results | None = None
    ) -> tuple[Route, int]:
        """The checked route of a batch and its rows R: ``route.run(tensors, R, out)`` is the rest of ``run``.

        The route may be kept for further batches of the same layout: of tensors with the same shapes, strides, dtypes
        and addresses, where addresses matter for bound inputs alone. It is valid until ``generation`` changes, and
        only inside or only outside of a capture, as it was asked for.

        Args:
            name: as for ``run``.
            tensors: as for ``run``.
            rows: as for ``run``.
            out: as for ``run``.

        Raises:
            TypeError, ValueError: as ``run``.
        """
        registration = self._registry.named(name)
        rows = checked_rows(registration.inputs, tensors, rows, self.device)
        matched = self._statics.matched(tensors)
        capturing = self._backend is not None and self._backend.capturing()
        route = self._routes.get((name, rows, matched, capturing)) or self._route(name, rows, matched, capturing)
        if out is not None and route.key is not None:
            check_out(out, self._variants[route.key].outputs.rows(rows))
        return route, rows

    def evict(self, name: str | None = None, rows: int | None = None, unbound: bool = False) -> int:
        """Remove the variants that meet every given condition, or all variants; owned buffers stay.

        Args:
            name: only variants of this callable.
            rows: only variants of this bucket.
            unbound: only variants that read a tensor which is no longer bound.

        Returns:
            The number of variants removed.

        Raises:
            ValueError: an unknown name.
        """
        if name is not None:
            self._registry.named(name)
        bound = set(self._statics.bindings.values())
        leaving = [key for key in self._variants if name in (None, key.name) and rows in (None, key.rows)]
        if unbound:
            leaving = [key for key in leaving if not bound.issuperset(key.binding or ())]
        self._forget_routes()
        for key in leaving:
            del self._variants[key]
        self._counters.evictions += len(leaving)
        if self._backend is not None and not self._variants:
            self._backend.reset()
        return len(leaving)

    def prepared(self) -> list[VariantKey]:
        """The keys of the variants held, in order of capture."""
        return list(self._variants)

    def statistics(self) -> CacheStatistics:
        """The counts since the last reset, and the variants and bytes held now."""
        self._counters.collect(self._routes.values())
        return self._counters.snapshot(
            variants=len(self._variants),
            pool_bytes=0 if self._backend is None else self._backend.pool_bytes(),
            buffer_bytes=self._statics.nbytes(),
        )

    def reset_statistics(self) -> None:
        """Set every count to zero; variants and buffers stay."""
        self._counters.collect(self._routes.values())
        self._counters = Counters()

    def _route(self, name: str, rows: int, matched: tuple[str, ...], capturing: bool) -> Route:
        key, reason = None, None
        if self._backend is not None and rows > 0 and not capturing:
            bindings = {each: self._statics.bindings[each] for each in matched}
            key, reason = choose(
                name, rows, bindings, ladder=self.ladder, registry=self._registry, prepared=self._variants
            )
        direct: Run = partial(_call, self._registry.named(name), self.device)
        route = Route(f"{name} rows={rows}", key, reason, direct if key is None else self._variants[key].run)
        self._routes[name, rows, matched, capturing] = route
        return route

    def _forget_routes(self) -> None:
        self.generation += 1
        self._counters.collect(self._routes.values())
        self._routes.clear()


def _call(
    registration: Registration, device: torch.device, tensors: Mapping[str, Tensor], rows: int, out: Results | None
) -> Results:
    """The results of a direct call. No method: a route that holds this function must not keep the cache alive."""
    results = registration.call(tensors, rows, device)
    if out is None:
        return results
    check_out(out, results)
    copy_tensors(out, results)
    return out
