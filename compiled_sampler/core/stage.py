"""How stages are run. A stage is a function of tensors whose results are written to memory when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Other = TypeVar("Other")
Stage = TypeVar("Stage", bound=Callable[..., Any])


class Run(Protocol):
    """A function that calls a stage on tensors; keyword arguments are static."""

    def __call__(self, stage: Callable[..., Result], /, *tensors: Any, **static: Any) -> Result:
        """Return ``stage(*tensors, **static)``: eager, compiled or recorded, as the implementation decides."""
        ...


class Scratch(NamedTuple):
    """What a stage holds in eager torch, where that is far more than it reads and returns."""

    tokens: bool
    """Whether it holds numbers for each token of a row."""
    blocks: int
    """It holds numbers for each token of so many blocks of a row."""
    position_bytes: int
    """Bytes, measured, that it holds for each position of a row's history, and again for each draft of the row."""
    whole: int
    """How many of its first tensors it reads at any row, so that these are not cut."""


def holds(
    *, tokens: bool = False, blocks: int = 0, position_bytes: int = 0, whole: int = 0
) -> Callable[[Stage], Stage]:
    """Declares the scratch of a stage; arguments as ``Scratch``. Of others an operation holds a few numbers a row."""
    # It returns the very function, as compiled stages are cached by its name and code.

    def declared(stage: Stage) -> Stage:
        stage.scratch = Scratch(tokens, blocks, position_bytes, whole)  # type: ignore[attr-defined]
        return stage

    return declared


def scratch_of(stage: Callable[..., Any]) -> Scratch | None:
    """What a stage declares to hold; None where that is little."""
    return getattr(stage, "scratch", None)


def call(stage: Callable[..., Result], /, *tensors: Any, **static: Any) -> Result:
    """The result of a stage in eager torch."""
    return stage(*tensors, **static)


def overlap(
    run: Run, device: torch.device, first: Callable[[], Result], second: Callable[[], Other]
) -> tuple[Result, Other]:
    """The results of two independent chains of stages, which a ``run`` may overlap, on CUDA on two streams."""
    overlapped = getattr(run, "overlap", None)
    return (first(), second()) if overlapped is None else overlapped(device, first, second)


def steady_rows(run: Run, rows: Tensor) -> Tensor:
    """Rows ``[R, n]``, or a contiguous copy of rows that lie apart, for whose stride a ``run`` has no stages."""
    steadied = getattr(run, "steady_rows", None)
    return rows if steadied is None else steadied(rows)


def any_row(run: Run, flags: Tensor) -> bool:
    """Whether any row is flagged, so that the host can skip a chain of stages that no row needs."""
    # Reading the answer waits for the flags, so only CPU schedules call it: a CUDA graph records one chain for all
    # batches. A ``run`` that only collects stages to compile them ahead of time answers true.
    asked = getattr(run, "any_row", None)
    return bool(flags.any()) if asked is None else asked(flags)


def fuses(run: Run) -> bool:
    """Whether stages become fused kernels, so that what is inside of one never reaches memory."""
    # Eager torch writes every intermediate tensor of a stage.
    return bool(getattr(run, "fuses", False))


def lists(run: Run) -> bool:
    """Whether stages are only listed, to be compiled: the host must not wait for other processes then."""
    return bool(getattr(run, "lists", False))
