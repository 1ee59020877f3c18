"""What calls share with earlier ones: checks that need not be made again, and the choice of a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor, is_grad_enabled, is_inference_mode_enabled

from compiled_sampler.engine.step_runner import ResolvedStep, StepRunner
from compiled_sampler.lowering.inductor.layout_guards import alike

MOST_CALLS = 1024  # an engine whose logits are new tensors each step brings new addresses


class Calls:
    """Steps that were chosen, and checked, for calls of the same layouts and addresses, which saves 30 us a call.

    Args:
        runner: whose steps they are; those of another ``generation`` are forgotten, with the graphs that they hold.
    """

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._steps: dict[Hashable, list[tuple[Callable[..., bool], ResolvedStep]]] = {}
        self._count, self._generation = 0, runner.generation

    def step(
        self,
        key: tuple[Any, ...],
        tensors: tuple[Tensor | None, ...],
        out: Any,
        resolve: Callable[[], ResolvedStep],
        is_captured: bool,
    ) -> ResolvedStep:
        """The step that serves all calls which a check and the choice of a variant cannot tell from this one.

        Args:
            key: whatever decides about the step besides layouts and addresses.
            tensors: the caller's.
            out: tensors that take the results, or None for new ones.
            resolve: checks all arguments and chooses the step.
            is_captured: whether the current stream is being captured.
        """
        if self._generation != self._runner.generation:
            self._steps.clear()
            self._count, self._generation = 0, self._runner.generation
        try:
            fields = tensors if out is None else (*tensors, *out)
            if out is not None and isinstance(fields[-1], tuple):  # logprobs of ``out``
                fields = *fields[:-1], *fields[-1]
            addresses: list[int | None] = []
            present: list[Tensor] = []
            for field in fields:
                if field is None:
                    addresses.append(None)
                else:
                    addresses.append(field.data_ptr())
                    present.append(field)
            modes = is_inference_mode_enabled(), is_grad_enabled()  # on which it depends what may be written
            full_key = key, is_captured, modes, type(out), *addresses
            for is_alike, step in self._steps.get(full_key, ()):
                if is_alike(*present):
                    return step
        except (AttributeError, TypeError, RuntimeError):  # the check says what is wrong
            return resolve()
        step = resolve()
        if self._count >= MOST_CALLS:
            self._steps.clear()
            self._count = 0
        self._steps.setdefault(full_key, []).append((alike(present), step))
        self._count += 1
        return step


def without_ring(out: Any) -> Any:
    """``out``, or None for "ring", which is deprecated: once it saved what ``Sampler.bind`` saves today."""
    if not isinstance(out, str) or out != "ring":
        return out
    message = "out='ring' gives new tensors like out=None; pass tensors of yours, and bind(out=) before warmup()"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return None
