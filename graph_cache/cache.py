"""The cache: it registers callables, captures their variants and runs batches through them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from graph_cache.buffers import StaticTensors
from graph_cache.capture import CaptureBackend, CaptureError, CudaBackend, Progress, Variant, capture_variant
from graph_cache.keys import BucketLadder, OutBinding, VariantKey, keys_of, out_matches
from graph_cache.mirror import HostMirror
from graph_cache.registry import Given, Inputs, Registry, Results, check_out, checked_rows
from graph_cache.routes import Batch, CacheStatistics, Route, Routes, copied_bytes

Out = TypeVar("Out", bound=tuple[Tensor, ...])


class GraphCache:
    """Captured variants of registered callables, and the static buffers that they share.

    Use it from one thread and one stream at a time: runs share static buffers and are ordered by the stream alone.

    Args:
        device: of all tensors.
        buckets: the row counts that variants are captured with, in any order.
        backend: captures the variants; None for CUDA graphs on a CUDA device and direct calls elsewhere.
        mirror: where inputs ``on_host`` lie, and what else callables read that the host writes; a run brings over what
            changed. None without any.

    Attributes:
        bound_inputs: what ``bind`` was given, by input.
        bound_outs: what ``bind_out`` was given, by callable.

    Raises:
        ValueError: no bucket, or one below 1.
    """

    def __init__(
        self,
        device: torch.device | str,
        buckets: Iterable[int],
        *,
        backend: CaptureBackend | None = None,
        mirror: HostMirror | None = None,
    ) -> None:
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.ladder = BucketLadder.of(buckets)
        self._backend = CudaBackend(device) if backend is None and device.type == "cuda" else backend
        self._registry = Registry()
        self._statics = StaticTensors(self._registry, self.ladder.largest, device, mirror)
        self._variants: dict[VariantKey, Variant] = {}  # in order of capture
        self.bound_inputs: Mapping[str, Tensor] = self._statics.bound
        self.bound_outs: Mapping[str, Results] = self._statics.bound_outs
        self._routes = Routes(self._registry, self.ladder, self._variants, device, mirror)
        self._captures = self._evictions = 0  # since the counts were reset

    def register(
        self, name: str, fn: Callable[..., Any], inputs: Inputs, *, covers: Sequence[str] = (), most_copied: float = inf
    ) -> None:
        """Register ``fn`` under ``name``.

        Args:
            name: unique; ``run`` takes it.
            fn: ``fn(**tensors) -> NamedTuple of tensors``, see the contract in the package's docstring.
            inputs: the layout of each keyword; callables that share an input name share its buffer.
            covers: callables registered before, whose results this one gives too, bit for bit and in the same
                NamedTuple type, if the inputs that they lack hold their fill.
            most_copied: bytes; a batch with more to copy for its own variant is called directly.

        Raises:
            ValueError: a name taken, no input, one with another layout than before or on the host of a cache without a
                mirror; an unknown covered name.
        """
        of_host = [key for key, spec in inputs.items() if spec.on_host]
        if of_host and self._statics.mirror is None:
            raise ValueError(f"input {of_host[0]!r} on the host must have a mirror; GraphCache(mirror=HostMirror(...))")
        self._registry.add(name, fn, inputs, covers, most_copied)

    def bind(self, input_name: str, tensor: Tensor) -> None:
        """Let variants that are captured from now on read ``tensor`` in place; a reference to it is kept.

        Its rows after the batch are read too. Buckets of more rows than it has use owned buffers.

        Args:
            input_name: an input of a registered callable.
            tensor: ``[rows, >= tail...]``, any strides, of a dtype that the input takes.

        Raises:
            TypeError: no tensor, or another dtype.
            ValueError: an unknown input, another device, a shorter tail.
        """
        self._routes.forget()  # first: an interrupt in between must leave none to another tensor
        self._statics.bind(input_name, tensor)

    def bind_out(self, name: str, out: Results) -> None:
        """Let variants of a callable that are captured from now on write ``out`` in place; a reference to it is kept.

        They serve runs whose ``out`` has the first rows of these tensors, and write rows up to their bucket.

        Args:
            name: of the callable.
            out: NamedTuple as it returns it, ``[rows, *T]`` each; int32 may take int64, where the numbers fit. Buckets
                of more rows use owned buffers.

        Raises:
            ValueError: an unknown name.
        """
        self._routes.forget()
        self._statics.bind_out(name, out)

    def unbind(self, input_name: str | None = None) -> None:
        """Drop a binding and its reference, or those of all inputs and results; variants stay, unused, until evicted.

        Raises:
            ValueError: the input is unknown or not bound.
        """
        self._routes.forget()
        self._statics.unbind(input_name)

    generation: Any = property(attrgetter("_routes.generation"))  # asked for in every step: no frame of Python
    """Changes when variants or bindings come or go, after which no route from before may be used."""

    def input_buffer(self, input_name: str) -> Tensor:
        """The owned buffer ``[M * times, *T]`` of an input; a batch in its first rows is run without a copy.

        Views from other rows must not be passed to ``run``, which fills from batch to bucket.

        Raises:
            ValueError: an unknown input, or one on the host.
        """
        return self._statics.owned(input_name).lend()

    def warmup(
        self, names: Iterable[str] | None = None, buckets: Iterable[int] | None = None, progress: Progress | None = None
    ) -> None:
        """Capture every variant that is not held yet, the largest bucket first.

        What is bound and has enough rows for the bucket is read and written in place; all else gets owned buffers.
        Where results or inputs of few numbers a row are bound, further variants are for batches that bring others.

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
        if self._is_capturing():
            raise RuntimeError("warmup must not run inside a capture; call it before the outer capture begins")
        bindings, outs = self._statics.bindings, self._statics.outs
        planned = [
            key
            for size in reversed(sizes)
            for registration in chosen
            for key in keys_of(registration.name, registration.inputs, bindings, outs.get(registration.name), size)
        ]
        self._capture([key for key in dict.fromkeys(planned) if key not in self._variants], progress)

    def capture_for(
        self, name: str, tensors: Mapping[str, Given], *, rows: int | None = None, out: Results | None = None
    ) -> bool:
        """Capture the variant that is made for such a batch, unless it is held; whether it is held now.

        Arguments and errors as for ``run``, and a CaptureError as for ``warmup``. None is captured for a batch of more
        rows than the largest bucket or with more than ``most_copied`` to copy, nor in a capture.
        """
        registration = self._registry.named(name)
        num_rows = checked_rows(registration.inputs, tensors, rows, self.device)
        bucket = self.ladder.bucket_for(num_rows)
        if not bucket or self._backend is None or self._is_capturing():
            return False
        bound, bound_out = self._in_place(name, tensors, out)
        if copied_bytes(registration, tensors, num_rows, bound) > registration.most_copied:
            return False
        matched = {input_name: self._statics.bindings[input_name] for input_name in bound}
        key = keys_of(name, registration.inputs, matched, bound_out, bucket)[0]
        if key not in self._variants:
            self._capture([key])
        return True

    def _capture(self, keys: Sequence[VariantKey], progress: Progress | None = None) -> None:
        """Capture variants; where one fails, those before it stay."""
        assert self._backend is not None
        for done, key in enumerate(keys, start=1):
            self._variants[key] = capture_variant(key, self._registry.named(key.name), self._statics, self._backend)
            self._captures += 1
            self._routes.forget()
            if progress is not None:
                progress(done, len(keys), str(key))

    def forget_routes(self) -> None:
        """Have every route chosen anew: ``generation`` changes."""
        self._routes.forget()

    @overload
    def run(self, name: str, tensors: Mapping[str, Given], *, rows: int | None = None, out: Out) -> Out: ...

    @overload
    def run(self, name: str, tensors: Mapping[str, Given], *, rows: int | None = None, out: None = None) -> Any: ...

    def run(
        self, name: str, tensors: Mapping[str, Given], *, rows: int | None = None, out: Results | None = None
    ) -> Any:
        """The callable's results for a batch, by replay of a variant if one can serve it.

        While the current stream is being captured, and for a batch without rows, the callable itself is called. A
        replay with ``out`` neither allocates device memory nor waits for the device.

        Args:
            name: a registered callable.
            tensors: ``[R, >= tail...]`` each, any strides; with ``rows`` given, more rows are allowed. An input
                ``on_host`` may be bytes, R int64 of the host, such as ``array.tobytes()`` of numpy: a replay brings
                them through pinned memory, if they are not those that it brought last.
            rows: number of rows R to use, the first ones; None for all.
            out: NamedTuple as the callable returns it, of ``[R, *T]`` tensors that take the results; int32 may take
                int64, where the numbers fit.

        Returns:
            ``out``, or the callable's NamedTuple of new tensors ``[R, *T]``.

        Raises:
            TypeError: wrong types or dtypes.
            ValueError: unknown names; shapes, rows or devices that do not fit.
        """
        route, rows = self.route(name, tensors, rows=rows, out=out)
        return route.run(tensors, rows, out)

    def route(
        self,
        name: str,
        tensors: Mapping[str, Given],
        *,
        rows: int | None = None,
        out: Results | None = None,
        is_exact: bool = False,
    ) -> tuple[Route, int]:
        """The checked route of a batch and its rows R: ``route.run(tensors, R, out)`` is the rest of ``run``.

        The route may be kept for further batches of tensors with the same shapes, strides, dtypes and addresses, and
        other bytes. It is valid until ``generation`` changes, and only inside or only outside of a capture, as it was
        asked for. With ``is_exact`` no callable that covers ``name`` may serve it; all else is as for ``run``.
        """
        registration = self._registry.named(name)
        rows = checked_rows(registration.inputs, tensors, rows, self.device)
        bound, bound_out = self._in_place(name, tensors, out)
        is_copied = copied_bytes(registration, tensors, rows, bound) > registration.most_copied
        is_direct = self._backend is None or self._is_capturing()
        batch = Batch(name, rows, bound, bound_out is not None, is_direct, is_exact, is_copied)
        route = self._routes.of(batch, self._statics.bindings, self._statics.outs)
        if out is not None and route.key is not None:
            check_out(out, self._variants[route.key].outputs.rows(rows))
        return route, rows

    def _in_place(
        self, name: str, tensors: Mapping[str, Given], out: Results | None
    ) -> tuple[tuple[str, ...], OutBinding | None]:
        """The inputs that a batch brings where they are bound, and what is bound of results, if its ``out`` is that."""
        of_out = self._statics.outs.get(name)
        return self._statics.matched(tensors), of_out if of_out is not None and out_matches(of_out, out) else None

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
            outs = {None, *self._statics.outs.values()}
            leaving = [key for key in leaving if not bound.issuperset(key.binding or ()) or key.out not in outs]
        self._routes.forget()
        for key in leaving:
            del self._variants[key]
        if self._backend is not None and not self._variants:
            self._backend.reset()  # the memory of all captures goes with the last one
        self._evictions += len(leaving)
        return len(leaving)

    def prepared(self) -> list[VariantKey]:
        """The keys of the variants held, in order of capture."""
        return list(self._variants)

    def statistics(self) -> CacheStatistics:
        """The counts since the last reset, and the variants and bytes held now."""
        counts, backend = self._routes, self._backend
        counts.collect_counts()
        return CacheStatistics(
            variants=len(self._variants),
            captures=self._captures,
            replays=counts.replays,
            direct_runs=counts.direct_runs,
            evictions=self._evictions,
            fallbacks=dict(counts.fallbacks),
            coverage=dict(counts.coverage),
            pool_bytes=0 if backend is None else backend.pool_bytes(),
            buffer_bytes=self._statics.nbytes(),
        )

    def reset_statistics(self) -> None:
        """Set every count to zero; variants and buffers stay."""
        self._captures = self._evictions = 0
        self._routes.reset_counts()

    def _is_capturing(self) -> bool:
        """Whether the current stream is being captured by somebody else."""
        return self._backend is not None and self._backend.capturing()


_MOST_FAILURES = 2  # of captures of one variant


class LateCaptures:
    """Captures of variants when batches come, once what their callables need is ready.

    Args:
        cache: that captures.
        is_ready: whether nothing that a callable asked for, such as compiled code, is still to come.
        logger: is told of a variant that is given up.
    """

    def __init__(self, cache: GraphCache, is_ready: Callable[[], bool], logger: logging.Logger) -> None:
        self._cache, self._is_ready, self._logger = cache, is_ready, logger
        self._failures: Counter[tuple[str, int | None]] = Counter()  # by callable and the rows of its variant

    def capture(self, name: str, tensors: Mapping[str, Given], rows: int, out: Results | None = None) -> bool | None:
        """Whether the variant of a batch is held now; None if a later batch shall ask again.

        Arguments and errors as for ``GraphCache.capture_for``.
        """
        variant = name, self._cache.ladder.bucket_for(rows)
        if self._failures[variant] >= _MOST_FAILURES:
            return False
        if not self._is_ready():
            return None
        try:
            return self._cache.capture_for(name, tensors, rows=rows, out=out)
        except CaptureError as error:
            if not self._is_ready():  # it has asked for something that nobody had asked for before
                return None
            self._failures[variant] += 1  # the reason may pass: memory, code that came meanwhile
            if self._failures[variant] < _MOST_FAILURES:
                return None
            self._logger.warning("%s runs without a graph: %s", name, error)
            return False
