"""The cache: it registers callables, captures their variants and runs batches through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from graph_cache.buffers import StaticTensors
from graph_cache.capture import CaptureBackend, CudaBackend
from graph_cache.mirror import HostMirror
from graph_cache.registry import Given, Inputs, Registry, Results, check_out, checked_rows
from graph_cache.routes import CacheStatistics, Routes
from graph_cache.routing import Batch, BucketLadder, Route, VariantKey, usable_bindings
from graph_cache.variants import Progress, Variants

Out = TypeVar("Out", bound=tuple[Tensor, ...])


class GraphCache:
    """Captured variants of registered callables, and the static buffers that they share.

    Use it from one thread and one stream at a time: runs share static buffers and are ordered by the stream alone.

    Args:
        device: of all tensors.
        buckets: the row counts that variants are captured with, in any order.
        backend: captures the variants; None for CUDA graphs on a CUDA device and direct calls elsewhere.
        most_seen: variants of ``capture_seen`` that are held at once.
        mirror: where inputs ``on_host`` lie, and what else callables read that the host writes; a run brings over what
            changed. None without any.

    Raises:
        ValueError: no bucket, or one below 1.
    """

    def __init__(
        self,
        device: torch.device | str,
        buckets: Iterable[int],
        *,
        backend: CaptureBackend | None = None,
        most_seen: int = 64,
        mirror: HostMirror | None = None,
    ) -> None:
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.ladder, self.most_seen = BucketLadder.of(buckets), most_seen
        backend = CudaBackend(device) if backend is None and device.type == "cuda" else backend
        self._registry = Registry()
        self._statics = StaticTensors(self._registry, self.ladder.largest, device, mirror)
        self._variants = Variants(self._registry, self._statics, backend)
        self._routes = Routes(self._registry, self.ladder, self._variants, device, mirror)

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
        self._statics.check_mirror(inputs)
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
        self._statics.bind(input_name, tensor)
        self._routes.forget()

    def unbind(self, input_name: str) -> None:
        """Drop the binding and its reference; variants that read the tensor stay, unused, until they are evicted.

        Raises:
            ValueError: the input is unknown or not bound.
        """
        self._statics.unbind(input_name)
        self._routes.forget()

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
        if self._variants.backend is None:
            return
        if self._is_capturing():
            raise RuntimeError("warmup must not run inside a capture; call it before the outer capture begins")
        planned = [
            VariantKey(each.name, size, usable_bindings(each.inputs, self._statics.bindings, size))
            for size in reversed(sizes)
            for each in chosen
        ]
        missing = [key for key in dict.fromkeys(planned) if key not in self._variants]
        self._variants.capture(missing, progress, self._captured)

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
        asked for.

        Args:
            name: as for ``run``.
            tensors: as for ``run``.
            rows: as for ``run``.
            out: as for ``run``.
            is_exact: whether no callable that covers ``name`` may serve it instead.

        Raises:
            TypeError, ValueError: as ``run``.
        """
        registration = self._registry.named(name)
        rows = checked_rows(registration.inputs, tensors, rows, self.device)
        matched = {each: self._statics.bindings[each] for each in self._statics.matched(tensors)}
        bound = {each.input_name: each for each in usable_bindings(registration.inputs, matched, rows) or ()}
        batch = Batch.of(name, rows, tensors, bound, out)
        route = self._routes.of(batch, matched, self._is_capturing(), is_exact)
        if out is not None and route.key is not None:
            check_out(out, self._variants[route.key].outputs.rows(rows))
        return route, rows

    def capture_seen(self, at_least: int = 2, progress: Progress | None = None) -> int:
        """Capture variants that read and write in place the tensors that came back in runs since the last call.

        They serve batches of exactly their rows. At most ``most_seen`` are held; those that served the fewest runs
        leave for new ones.

        Args:
            at_least: runs with a tensor, after which it counts as one that comes back.
            progress: called after each capture as ``progress(done, total, label)``.

        Returns:
            The number of variants captured; one that fails is left out with a warning.

        Raises:
            RuntimeError: the current stream is being captured.
        """
        if self._variants.backend is None:
            return 0
        if self._is_capturing():
            raise RuntimeError("capture_seen must not run inside a capture; call it before the outer capture begins")
        self._routes.forget()
        seen, held = self._routes.seen, [key for key in self._variants if key.seen]
        wanted = [key for key in seen.returning(at_least) if key.rows <= self.ladder.largest]
        new = [key for key in wanted if key not in self._variants][: self.most_seen]
        self._leave(seen.least_served(held, len(held) + len(new) - self.most_seen))
        before = len(self._variants)
        self._variants.capture(new, progress, self._captured)
        seen.forget()
        return len(self._variants) - before

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
            leaving = [key for key in leaving if not key.seen and not bound.issuperset(key.binding or ())]
        return self._leave(leaving)

    def prepared(self) -> list[VariantKey]:
        """The keys of the variants held, in order of capture."""
        return list(self._variants)

    def statistics(self) -> CacheStatistics:
        """The counts since the last reset, and the variants and bytes held now."""
        pool_bytes = 0 if self._variants.backend is None else self._variants.backend.pool_bytes()
        return self._routes.counted().snapshot(
            variants=len(self._variants), pool_bytes=pool_bytes, buffer_bytes=self._statics.nbytes()
        )

    def reset_statistics(self) -> None:
        """Set every count to zero; variants and buffers stay."""
        self._routes.reset_counters()

    def _leave(self, keys: Sequence[VariantKey]) -> int:
        self._variants.drop(keys, self._routes.forget)
        self._routes.counters.evictions += len(keys)
        return len(keys)

    def _captured(self) -> None:
        """One variant more."""
        self._routes.counters.captures += 1
        self._routes.forget()

    def _is_capturing(self) -> bool:
        """Whether the current stream is being captured by somebody else."""
        return self._variants.backend is not None and self._variants.backend.capturing()
