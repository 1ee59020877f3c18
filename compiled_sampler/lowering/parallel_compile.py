"""Compiling ahead of running: stages are traced one after the other while compilers work on the kernels of others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

_PATCHING = threading.RLock()  # one thread at a time compiles ahead


@contextmanager
def side_by_side() -> Iterator[None]:
    """Within, what this thread compiles is not ready to run; at the end it is.

    Inductor hands every kernel to a pool of processes and waits for it before it goes on. Here it waits once, for all.

    Raises:
        Exception: the first of the compilers' errors.
    """
    with _PATCHING, _one_wait():
        yield


@contextmanager
def _one_wait() -> Iterator[None]:
    original, here = AsyncCompile.wait, threading.get_ident()
    waiting: list[tuple[AsyncCompile, dict[str, Any]]] = []
    errors = []

    def wait(self: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == here:
            waiting.append((self, scope))
        else:
            original(self, scope)

    AsyncCompile.wait = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.wait = original  # type: ignore[method-assign]
        for compilation, scope in waiting:  # each, whatever happened to the others
            try:
                original(compilation, scope)
            except Exception as error:
                errors.append(error)
    if errors:
        raise errors[0]


class Ahead:
    """Launches hand-written kernels from a thread of its own, because Triton compiles a kernel when it is launched.

    Args:
        device: of their tensors.
    """

    def __init__(self, device: torch.device) -> None:
        """No thread yet."""
        self._device = device
        self._launches: list[Future[Any]] = []
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Ahead:
        """Ready for launches."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Wait for all launches; an error of one is raised."""
        self._pool.shutdown(cancel_futures=raised[0] is not None)
        if raised[0] is None:
            for launch in self._launches:
                launch.result()

    def launched(self, stage: Callable[..., Any], tensors: tuple[Any, ...], static: dict[str, Any]) -> Any:
        """What ``foreseen`` gives for a stage, which will have run when this ends; on the CPU there is no need to."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)  # on which the tensors were made
            self._launches.append(self._pool.submit(_launch, stream, stage, tensors, static))
        return foreseen(stage, tensors, static)


def foreseen(stage: Callable[..., Any], tensors: tuple[Any, ...], static: dict[str, Any]) -> Any:
    """Zeros in the shapes of what a stage returns, without computing it."""
    with FakeTensorMode() as mode:
        made = stage(*tree_map_only(Tensor, mode.from_tensor, tensors), **static)
    return tree_map_only(Tensor, _zeros, made)


def _launch(
    stream: torch.cuda.Stream, stage: Callable[..., Any], tensors: tuple[Any, ...], static: dict[str, Any]
) -> None:
    with torch.cuda.stream(stream):
        stage(*tensors, **static)


def _zeros(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()
