"""Capturing work into CUDA graphs that share one memory pool."""

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
    """What turns work on static tensors into something that can be replayed."""

    def capturing(self) -> bool:
        """True while the current stream is being captured by somebody else."""

    def warm_up(self, work: Callable[[], T]) -> T:
        """Runs ``work`` as often as lazy set-up needs and returns what the last call returned."""

    def capture(self, work: Callable[[], object]) -> Replay:
        """A callable that repeats the device work of ``work`` on the current stream.

        Raises:
            Exception: what ``work`` raised; earlier captures stay valid and later ones possible.
        """

    def pool_bytes(self) -> int:
        """Device memory that the captures hold."""

    def reset(self) -> None:
        """Gives the pool back; called when no capture is held any longer."""


class CudaBackend:
    """Captures with ``torch.cuda.graph`` on a side stream, which launches nothing, all graphs in one pool."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is allocated before the first capture.

        Args:
            device: a CUDA device with an index.
        """
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: PoolHandle = None
        self._anchors: dict[PoolHandle, torch.cuda.CUDAGraph] = {}
        self._failed: list[torch.cuda.CUDAGraph] = []

    def capturing(self) -> bool:
        """True while the current stream is being captured by somebody else."""
        return torch.cuda.is_current_stream_capturing()

    def warm_up(self, work: Callable[[], T]) -> T:
        """Runs ``work`` twice on the current stream and returns the last result.

        Not on the side stream, where it would hold memory that the current one could use again; and where a process has
        launched kernels on about ten streams, all kernels of its graphs take longer.
        """
        with torch.cuda.device(self.device):
            work()
            return work()

    def capture(self, work: Callable[[], object]) -> Replay:
        """A graph of ``work``, as the callable that replays it on the current stream.

        Raises:
            Exception: what ``work`` raised, or what ended the capture; the allocator and the streams are restored.
        """
        with torch.cuda.device(self.device):
            if self._pool is None:
                self._pool = self._new_pool()
            graph = torch.cuda.CUDAGraph()
            try:
                self._record(graph, work, self._pool)
            except Exception:
                self._abandon(graph, self._pool)
                raise
            return graph.replay

    def pool_bytes(self) -> int:
        """Bytes of the segments that the allocator holds for the graph pools."""
        if not self._anchors:
            return 0
        snapshot: Any = torch.cuda.memory_snapshot  # untyped in torch
        return sum(each["total_size"] for each in snapshot() if tuple(each["segment_pool_id"]) in self._anchors)

    def reset(self) -> None:
        """Lets go of the pools; the next capture opens a new one."""
        self._pool = None
        self._anchors.clear()

    def _side_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            make_stream: Any = torch.cuda.Stream  # untyped in torch
            self._stream = make_stream(self.device)
        return self._stream

    def _new_pool(self) -> PoolHandle:
        """A pool held open by a graph of one launch.

        The allocator refuses a pool handle whose last graph is gone. A capture that succeeds also puts the state of
        the default generator right that one that failed before it left in capture.
        """
        pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        self._record(graph, torch.zeros(1, device=self.device).zero_, pool)
        self._anchors[pool] = graph
        return pool

    def _record(self, graph: torch.cuda.CUDAGraph, work: Callable[[], object], pool: PoolHandle) -> None:
        """Captures ``work`` into ``graph``; raises what ``work`` raised, rather than what that did to the capture."""
        side = self._side_stream()
        cause: Exception | None = None
        try:
            # The outer context restores the stream: the inner one does not when ending the capture raises.
            with (
                uncollected(),
                torch.cuda.stream(side),
                torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"),
            ):
                try:
                    work()
                except Exception as error:
                    cause = error
                    raise
        except Exception as error:
            if cause is None or cause is error:
                raise
            raise cause from None

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: PoolHandle) -> None:
        """Takes the allocator out of a capture that could not be ended, and moves later captures to a new pool.

        ``CUDAGraph.capture_end`` raises before it tells the allocator when the capture was invalidated: memory would
        be looked for in the pool for ever, and the pool could not be captured into again. Earlier graphs keep it.
        """
        try:
            torch._C._cuda_endAllocateToPool(self.device.index, pool)
        except RuntimeError:
            return  # the capture was ended, nothing is left to undo
        torch._C._cuda_releasePool(self.device.index, pool)
        self._failed.append(graph)  # the host allocator still refers to it
        self._pool = None
        with suppress(RuntimeError):  # a device that cannot capture at all says so at the next capture
            self._pool = self._new_pool()


@contextmanager
def uncollected() -> Iterator[None]:
    """Within, no garbage is collected by itself: a graph that goes while another is captured ends that capture.

    Graphs of a cache that nobody holds any longer may be such garbage. Torch collected it before each capture once, and
    no longer does.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def default_backend(device: torch.device) -> CaptureBackend | None:
    """CUDA graphs on a CUDA device, nothing elsewhere."""
    return CudaBackend(device) if device.type == "cuda" else None
