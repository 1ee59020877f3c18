"""Inductor's wait for the compilers of a stage's kernels, put off until all stages are traced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._inductor.async_compile import AsyncCompile


@contextmanager
def one_wait() -> Iterator[None]:
    """Within, what this thread compiles is not ready to run; at the end it is.

    Inductor hands every kernel to a pool of processes and waits for it before it goes on. Here it waits once, for all.

    Raises:
        Exception: the first of the compilers' errors.
    """
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
