"""What runs a stage: a function of tensors at whose end results are written to memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Other = TypeVar("Other")


class Run(Protocol):
    """Calls a stage on tensors; keyword arguments are static."""

    def __call__(self, stage: Callable[..., Result], /, *tensors: Any, **static: Any) -> Result:
        """Call ``stage(*tensors, **static)`` in one way or another."""
        ...


def call(stage: Callable[..., Result], /, *tensors: Any, **static: Any) -> Result:
    """Run a stage as it is, in eager torch."""
    return stage(*tensors, **static)


def both(
    run: Run, device: torch.device, first: Callable[[], Result], second: Callable[[], Other]
) -> tuple[Result, Other]:
    """What two chains of stages return that need nothing of each other; a ``run`` may let them overlap.

    Args:
        run: that both chains use.
        device: of their tensors.
        first: where they compete, it goes first: the one whose stages are many and small.
        second: the other.
    """
    overlapped = getattr(run, "both", None)
    return (first(), second()) if overlapped is None else overlapped(device, first, second)


def any_of(run: Run, flags: Tensor) -> bool:
    """Whether a row is flagged, which decides if a chain of stages is run at all.

    It waits for the flags, so that it is for the CPU alone: a CUDA graph records one chain for all batches. A ``run``
    that only looks ahead says yes.

    Args:
        run: that the chain uses.
        flags: bool ``[R]``.
    """
    asked = getattr(run, "any_of", None)
    return bool(flags.any()) if asked is None else asked(flags)
