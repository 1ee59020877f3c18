"""What stands in for stages while they are listed to be compiled: zeros, and launches in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler.lowering.compiling.stage_code import StageCode
from compiled_sampler.lowering.inductor.compilation import fake_results
from compiled_sampler.lowering.stages.stage_call import StageCall
from compiled_sampler.lowering.stages.tuning import Stage


class BackgroundLaunches:
    """Launches hand-written kernels from a thread of its own, because Triton compiles a kernel when it is launched."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launches: list[Future[Any]] = []
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> BackgroundLaunches:
        return self

    def __exit__(self, *raised: object) -> None:
        """Wait for all launches; an error of one is raised."""
        self._pool.shutdown(cancel_futures=raised[0] is not None)
        if raised[0] is None:
            for launch in self._launches:
                launch.result()

    def launch(self, stage: Callable[..., Any], tensors: tuple[Any, ...], static: dict[str, Any]) -> None:
        """Let a stage run before this context ends; on the CPU it never runs."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)  # on which the tensors were made
            self._launches.append(self._pool.submit(_launch, stream, stage, tensors, static))


class Listing:
    """Calls of stages that are listed instead of made."""

    def __init__(self, background: BackgroundLaunches) -> None:
        self._background = background
        self._calls: dict[Hashable, StageCall] = {}
        self.launched: dict[Hashable, StageCall] = {}
        self._results: dict[Hashable, Any] = {}
        self._seconds: dict[Hashable, float] = {}

    def launch(self, shapes: Hashable, stage: Stage, tensors: tuple[Any, ...], static: dict[str, Any]) -> Any:
        """Zeros in the shapes of what a stage returns that is launched meanwhile."""
        self._background.launch(stage, tensors, static)
        self.launched.setdefault(shapes, StageCall.of(stage, tensors, static))
        return self.zeros(shapes, stage, tensors, static)

    def add(self, shapes: Hashable, stage: Stage, tensors: tuple[Any, ...], static: dict[str, Any]) -> Any:
        """Zeros in the shapes of what a stage returns that is to be compiled."""
        self._calls.setdefault(shapes, StageCall.of(stage, tensors, static))
        return self.zeros(shapes, stage, tensors, static)

    def zeros(self, shapes: Hashable, stage: Stage, tensors: tuple[Any, ...], static: dict[str, Any]) -> Any:
        """Zeros in the shapes of what a stage returns; ``shapes`` distinguishes the call."""
        if shapes not in self._results:
            began = time.perf_counter()
            self._results[shapes] = fake_results(stage, tensors, static)
            self._seconds[shapes] = time.perf_counter() - began
        return zeros_like(self._results[shapes])

    def longest_first(self) -> list[StageCode]:
        """Each different code once; first what has many operations, whose shapes took long."""
        # A long stage that is begun last would be waited for alone.
        found: dict[Any, tuple[float, StageCode]] = {}
        for shapes, call in self._calls.items():
            code = StageCode.of_call(call)
            found.setdefault(code.key, (self._seconds[shapes], code))
        return [code for _, code in sorted(found.values(), key=lambda each: -each[0])]


def zeros_like(results: Any) -> Any:
    """Zeros in the shapes of ``fake_results``."""
    return tree_map_only(Tensor, _zeros, results)


def _launch(
    stream: torch.cuda.Stream, stage: Callable[..., Any], tensors: tuple[Any, ...], static: dict[str, Any]
) -> None:
    with torch.cuda.stream(stream):
        stage(*tensors, **static)


def _zeros(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()
