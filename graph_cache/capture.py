"""Variants, which are callables captured on static tensors; and the backend that captures them into CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from graph_cache.buffers import HostInput, InputBuffer, OutputBuffers, StaticTensors, copy_tensors
from graph_cache.keys import VariantKey
from graph_cache.mirror import HostMirror
from graph_cache.registry import Given, Registration, Results, first_rows, rows_used

T = TypeVar("T")
Progress = Callable[[int, int, str], object]
Replay = Callable[[], object]
PoolHandle = Any  # a pair of ints, whose type torch keeps private


class CaptureError(RuntimeError):
    """A variant could not be captured; the cause is chained, and other variants are as they were before.

    Attributes:
        name: the registered callable.
        bucket: the rows P it was to be captured with.
    """

    def __init__(self, name: str, bucket: int, cause: Exception) -> None:
        super().__init__(
            f"{name}[{bucket}] could not be captured: {type(cause).__name__}: {cause}; a captured callable must not "
            "wait for the device (.item(), .cpu(), nonzero, a boolean index) and must return a NamedTuple of tensors. "
            "Other variants stay usable and this one is served without a graph; correct the callable, or free memory, "
            "then warmup again"
        )
        self.name = name
        self.bucket = bucket


@dataclass(frozen=True, slots=True)
class Variant:
    """A captured graph with its static tensors: it reads ``[P, *T]`` inputs and writes P rows of its outputs."""

    key: VariantKey
    replay: Replay
    of_host: tuple[tuple[str, HostInput], ...]  # that a batch may bring as bytes
    owned: tuple[tuple[str, InputBuffer], ...]  # those, and all that a batch is copied to; other inputs are bound
    outputs: OutputBuffers  # written by the graph, unless it writes the caller's ``out``
    mirror: HostMirror | None

    def run(self, tensors: Mapping[str, Given], rows: int, out: Results | None) -> Results:
        """The results of a batch that is copied in, replayed and copied out on the current stream, without a sync."""
        # rows is at most P; a missing owned input is filled with its fill; out is checked already.
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        bucket = self.key.rows
        for name, written in self.of_host:
            if isinstance(numbers := tensors.get(name), bytes):
                written.hold(numbers, rows, bucket)
        if self.mirror is not None:
            self.mirror.upload(is_replayed=True)  # before the copies, whose rows it may bring too
        for name, buffer in self.owned:
            tensor = tensors.get(name)
            if isinstance(tensor, bytes):
                continue
            used, size = rows, bucket
            if buffer.is_ragged:
                used, size = 0 if tensor is None else rows_used(tensor, buffer.spec, rows), bucket * buffer.spec.times
            buffer.stage(tensor, used, size, targets, sources)
        if targets:
            copy_tensors(targets, sources)
        self.replay()
        if out is None:
            return self.outputs.copied(rows)
        if self.key.out is None:
            copy_tensors(out, self.outputs.rows(rows))
        return out


def capture_variant(
    key: VariantKey, registration: Registration, statics: StaticTensors, backend: CaptureBackend
) -> Variant:
    """The variant of a key: the callable is warmed up, then captured with the copy of its results to the outputs."""
    # Owned inputs of one number a row hold their fill: a callable that keeps a state of its own must not find the last
    # batch. So what is bound says nothing of live rows before a replay, and results are written by replays alone.
    inputs, in_place = registration.inputs, {binding.input_name for binding in key.binding or ()}
    lent = list[tuple[Tensor, Tensor]]()  # buffers that the caller writes, with what it wrote
    try:
        owned = {name: statics.owned(name) for name in inputs if name not in in_place}  # allocates
        of_host = tuple((name, buffer) for name, buffer in owned.items() if isinstance(buffer, HostInput))
        if statics.mirror is not None:
            statics.mirror.upload()
        for buffer in owned.values():
            written = buffer.forget()
            if written is not None:
                lent.append((buffer.tensor, written))
        tensors = dict[str, Tensor]()
        for name, spec in inputs.items():
            if name in owned:
                tensors[name] = owned[name].rows(key.rows * spec.times)
            else:
                bound = statics.bound[name]
                tensors[name] = first_rows(bound, rows_used(bound, spec, key.rows), spec.shape)
        live = {name: torch.full_like(tensors[name], inputs[name].fill) for name in in_place if inputs[name].on_host}
        results = backend.warm_up(lambda: registration.fn(**{**tensors, **live}))
        outputs = statics.outputs_of(registration, results, key.rows)
        targets = outputs.rows(key.rows)
        if key.out is not None:
            bound_out = statics.bound_outs[key.name]
            targets = tuple(field if field is None else field.detach()[: key.rows] for field in bound_out)

        def work() -> None:
            returned = registration.fn(**tensors)
            with torch.no_grad():
                copy_tensors(targets, returned)

        replay = backend.capture(work)
    except Exception as cause:
        raise CaptureError(key.name, key.rows, cause) from cause
    finally:
        for tensor, written in lent:
            tensor.copy_(written)
    return Variant(key, replay, of_host, tuple(owned.items()), outputs, statics.mirror)


class CaptureBackend(Protocol):
    """Captures work on static tensors for replay."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured, by a caller and not by this backend."""

    def warm_up(self, work: Callable[[], T]) -> T:
        """The result of the last call of ``work``, which is called until its lazy set-up is complete."""

    def capture(self, work: Callable[[], object]) -> Replay:
        """A callable that repeats the device work of ``work`` on the current stream.

        Raises:
            Exception: what ``work`` raised; earlier captures stay valid and later ones possible.
        """

    def pool_bytes(self) -> int:
        """Bytes of device memory that the captures hold."""

    def reset(self) -> None:
        """Release the pool; called when no capture is held any longer."""


class CudaBackend:
    """Captures with ``torch.cuda.graph`` on a side stream, all graphs in one pool; the device has an index."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: PoolHandle = None
        self._anchors: dict[PoolHandle, torch.cuda.CUDAGraph] = {}
        self._failed: list[torch.cuda.CUDAGraph] = []

    def capturing(self) -> bool:
        """Whether the current stream is being captured, by a caller and not by this backend."""
        return torch.cuda.is_current_stream_capturing()

    def warm_up(self, work: Callable[[], T]) -> T:
        """The result of the second of two calls of ``work`` on the current stream."""
        # On the side stream they would hold memory that the current stream could use again, and in a process that has
        # launched kernels on about ten streams all kernels of graphs take longer.
        with torch.cuda.device(self.device):
            work()
            return work()

    def capture(self, work: Callable[[], object]) -> Replay:
        """A graph of ``work``, as its replay; where it fails, the allocator and the streams are restored."""
        with torch.cuda.device(self.device):
            if self._pool is None:
                self._pool = self._new_pool()
            graph = torch.cuda.CUDAGraph()
            try:
                self._record(graph, work, self._pool)
            except BaseException:
                self._abandon(graph, self._pool)
                raise
            return graph.replay

    def pool_bytes(self) -> int:
        """Bytes of the segments that the caching allocator holds for the graph pools."""
        if not self._anchors:
            return 0
        snapshot: Any = torch.cuda.memory_snapshot  # untyped in torch
        return sum(part["total_size"] for part in snapshot() if tuple(part["segment_pool_id"]) in self._anchors)

    def reset(self) -> None:
        """Release the pools; the next capture makes a new one."""
        self._pool = None
        self._anchors.clear()

    def _new_pool(self) -> PoolHandle:
        """The handle of a new pool, kept open by a graph of one launch."""
        # The allocator refuses the handle of a pool whose last graph is gone. This capture also repairs the default
        # generator, which a capture that failed before it leaves in capture mode.
        pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        self._record(graph, torch.zeros(1, device=self.device).zero_, pool)
        self._anchors[pool] = graph
        return pool

    def _record(self, graph: torch.cuda.CUDAGraph, work: Callable[[], object], pool: PoolHandle) -> None:
        """Capture ``work`` into ``graph``; an exception of ``work`` is raised instead of that of the broken capture."""
        if self._stream is None:
            make_stream: Any = torch.cuda.Stream  # untyped in torch
            self._stream = make_stream(self.device)
        cause: BaseException | None = None
        try:
            # The outer context restores the stream: the inner one does not when ending the capture raises.
            with (
                uncollected(),
                torch.cuda.stream(self._stream),
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                try:
                    work()
                except BaseException as error:
                    cause = error
                    raise
        except Exception as error:
            if cause is None or cause is error:
                raise
            raise cause from None

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: PoolHandle) -> None:
        """End the allocator's part of a capture that could not be ended, and move later captures to a new pool."""
        # When a capture was invalidated, CUDAGraph.capture_end raises before it tells the allocator. All allocations
        # would then go to the pool, and no later capture could use it. Earlier graphs keep it.
        try:
            torch._C._cuda_endAllocateToPool(self.device.index, pool)
        except RuntimeError:
            return  # the capture was ended after all
        torch._C._cuda_releasePool(self.device.index, pool)
        self._failed.append(graph)  # the host allocator still refers to it
        self._pool = None
        with suppress(RuntimeError):  # a device that cannot capture at all says so at the next capture
            self._pool = self._new_pool()


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable automatic garbage collection: a graph destroyed while another one is captured ends that capture."""
    # Graphs of an unreachable cache may be such garbage, and torch no longer collects it before each capture.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
