"""What torch does while a test runs: waits for the device, denormals, the default dtype, and each operation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def no_waits() -> Iterator[None]:
    """Within, torch raises where the host would wait for the device; it is on a GPU alone that it could."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def flushing(flushes: bool = True) -> Iterator[None]:
    """Within, float operations of this thread take denormals for zeros, or not; afterwards as before."""
    before = not bool(torch.tensor(2.0**-126).mul(0.5))
    if not torch.set_flush_denormal(flushes):
        pytest.skip("this processor has no denormal mode")
    try:
        assert bool(torch.tensor(2.0**-126).mul(0.5)) != flushes
        yield
    finally:
        torch.set_flush_denormal(before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Operations(TorchDispatchMode):
    """Within, a function gets each operation of torch, its arguments, and what it made."""

    def __init__(self, see: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self._see(function, (args, kwargs), made)
        return made
