"""How stages are run. A stage is a function of tensors whose results are written to memory when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Other = TypeVar("Other")
Stage = TypeVar("Stage", bound=Callable[..., Any])


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


def _called(stage: Callable[..., Any], /, *tensors: Any, **static: Any) -> Any:
    return stage(*tensors, **static)


class Run:
    """How stages are run: by a function that calls them, or by what derives from it, which compiles or counts them."""

    def __init__(self, function: Callable[..., Any] = _called, *, fuses: bool = False) -> None:
        self._function = function
        self.fuses = fuses
        """Whether stages become fused kernels, so that what is inside of one never reaches memory."""
        # Eager torch writes every intermediate tensor of a stage.

    def __call__(self, stage: Callable[..., Result], /, *tensors: Any, **static: Any) -> Result:
        """The result of a stage; keyword arguments are static."""
        result: Result = self._function(stage, *tensors, **static)
        return result

    @property
    def lists(self) -> bool:
        """Whether stages are only listed, to be compiled: the host must not wait for other processes then."""
        return False

    def any_row(self, flags: Tensor) -> bool:
        """Whether any row is flagged, so that the host can skip a chain of stages that no row needs."""
        # Reading the answer waits for the flags, so only CPU schedules call it: a CUDA graph records one chain for all
        # batches. What only collects stages to compile them ahead of time answers true.
        return bool(flags.any())

    def overlap(
        self, device: torch.device, first: Callable[[], Result], second: Callable[[], Other]
    ) -> tuple[Result, Other]:
        """The results of two independent chains of stages, which may overlap, on CUDA on two streams."""
        return first(), second()

    def steady_rows(self, rows: Tensor) -> Tensor:
        """Rows ``[R, n]``, or a contiguous copy of rows that lie apart, if there are no stages for their stride."""
        return rows


call = Run()
"""Each stage in eager torch, on all rows at once."""
