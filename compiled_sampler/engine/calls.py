"""What calls share with earlier ones: checks that need not be made again, and the choice of a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor, is_grad_enabled, is_inference_mode_enabled

from compiled_sampler.engine.step_runner import Launch, StepRunner
from compiled_sampler.lowering.inductor.versions import alike

MOST_CALLS = 1024  # an engine whose logits are new tensors each step brings new addresses


class Calls:
    """Launches that were checked and chosen, by layouts and addresses of a call's tensors; they save 30 us a call.

    A call that is known runs through these frames, from ``Sampler.sample`` down: ``RequestHolder._check_current`` and
    ``Sampler._edits_of``, which return; ``launch_for`` and its guard, which return; then the ``Launch`` that
    ``StepRunner.resolve`` once made: ``Route.run``, ``Variant.run`` and the launch of the graph, or
    ``StepRunner._launch_uncaptured``, ``StepExecutor.__call__`` and the stages.
    """

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._launches: dict[Hashable, list[tuple[Callable[..., bool], Launch]]] = {}
        self._count, self._generation = 0, runner.generation

    def launch_for(
        self,
        key: tuple[Any, ...],
        tensors: tuple[Tensor | None, ...],
        out: Any,
        resolve: Callable[[], Launch],
        is_captured: bool,
    ) -> Launch:
        """What launches the step of all calls which a check and the choice of a variant cannot tell from this one."""
        # Launches of another ``generation`` are forgotten, with the graphs that they hold.
        if self._generation != self._runner.generation:
            self.forget()
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
            # ``key`` is whatever decides about the launch besides layouts and addresses
            full_key = key, is_captured, modes, type(out), *addresses
            for is_alike, launch in self._launches.get(full_key, ()):
                if is_alike(*present):
                    return launch
        except (AttributeError, TypeError, RuntimeError):  # the check says what is wrong
            return resolve()
        # checks all arguments and chooses the step
        launch = resolve()
        if self._count >= MOST_CALLS:
            self.forget()
        self._launches.setdefault(full_key, []).append((alike(present), launch))
        self._count += 1
        return launch

    def forget(self) -> None:
        """Drop all launches, with the graphs that they hold: one destroyed in an engine's capture would end that."""
        self._launches.clear()
        self._count, self._generation = 0, self._runner.generation


def without_ring(out: Any) -> Any:
    """``out``, or None for "ring", which is deprecated: once it saved what ``Sampler.bind`` saves today."""
    if not isinstance(out, str) or out != "ring":
        return out
    message = "out='ring' gives new tensors like out=None; pass tensors of yours, and bind(out=) before warmup()"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return None
