"""Captures of work on static tensors into CUDA graphs that share one memory pool."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")
Replay = Callable[[], object]
PoolHandle = Any  # a pair of ints, whose type torch keeps private


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
