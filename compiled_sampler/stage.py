"""What runs a stage: a function of tensors at whose end results are written to memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Run(Protocol):
    """Calls a stage on tensors; keyword arguments are static."""

    def __call__(self, stage: Callable[..., Result], /, *tensors: Any, **static: Any) -> Result:
        """Call ``stage(*tensors, **static)`` in one way or another."""
        ...


def call(stage: Callable[..., Result], /, *tensors: Any, **static: Any) -> Result:
    """Run a stage as it is, in eager torch."""
    return stage(*tensors, **static)
