"""What stands in for stages while they are listed to be compiled: zeros."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler.lowering.inductor.compilation import fake_results
from compiled_sampler.lowering.layouts import StageCall
from compiled_sampler.lowering.stage_code import StageCode
from compiled_sampler.lowering.tuning import Stage, is_hand_written


class Listing:
    """Calls of stages that are listed instead of made."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, StageCall] = {}
        self._results: dict[Hashable, Any] = {}
        self._seconds: dict[Hashable, float] = {}

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
        """Each different code once; first kernels of our own, then what has many operations, whose shapes took long."""
        # A long stage that is begun last would be waited for alone.
        found: dict[Any, tuple[float, StageCode]] = {}
        for shapes, call in self._calls.items():
            code = StageCode.of_call(call)
            found.setdefault(code.key, (self._seconds[shapes], code))
        ranked = sorted(found.values(), key=lambda timed: (not is_hand_written(timed[1].stage), -timed[0]))
        return [code for _, code in ranked]


def zeros_like(results: Any) -> Any:
    """Zeros in the shapes of ``fake_results``."""
    return tree_map_only(Tensor, _zeros, results)


def _zeros(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()
