"""What stands in for stages while they are listed to be compiled: zeros, and launches in the background."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only


class BackgroundLaunches:
    """Launches hand-written kernels from a thread of its own, because Triton compiles a kernel when it is launched.

    Args:
        device: of their tensors.
    """

    def __init__(self, device: torch.device) -> None:
        """No thread yet."""
        self._device = device
        self._launches: list[Future[Any]] = []
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> BackgroundLaunches:
        """Ready for launches."""
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


def fake_results(stage: Callable[..., Any], tensors: tuple[Any, ...], static: dict[str, Any]) -> Any:
    """What a stage returns, as tensors with neither numbers nor memory."""
    with FakeTensorMode() as mode:
        return stage(*tree_map_only(Tensor, mode.from_tensor, tensors), **static)


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
