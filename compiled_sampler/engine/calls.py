"""What calls share with earlier ones: checks that need not be made again, and results that come back in turn."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled

from compiled_sampler.engine.boundary.outputs import empty_outputs
from compiled_sampler.engine.step_runner import ResolvedStep, StepRunner
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.lowering.inductor.layout_guards import alike

Ring = Literal["ring"]
MOST_CALLS = 1024  # an engine whose logits are new tensors each step brings new addresses
RING_LEN = 2
"""Steps whose results are there at once: one is read while the next one runs."""
_MOST_RINGS = 64  # of results of one form; a caller that brings another form each time has others made


class ResultForm(NamedTuple):
    """The form of the results of a call."""

    kind: Any
    rows: int
    columns: int
    stops: bool
    """Whether they say which requests are finished."""
    logprobs: Logprobs | None


class Calls:
    """Answers calls by steps that were chosen, and checked, for calls of the same layouts and addresses.

    That saves 30 us a call. ``out="ring"`` is resolved here too.

    Args:
        runner: whose steps they are; those of another ``generation`` are forgotten, with the graphs that they hold.
        device: of results.
    """

    def __init__(self, runner: StepRunner, device: torch.device) -> None:
        self._runner, self._device = runner, device
        self._steps: dict[Hashable, list[tuple[Callable[..., bool], ResolvedStep]]] = {}
        self._count, self._generation = 0, runner.generation
        self._rings: dict[ResultForm, ResultRing] = {}

    def answer(
        self,
        key: tuple[Any, ...],
        tensors: tuple[Tensor | None, ...],
        out: Any,
        form: Callable[[], ResultForm],
        resolve: Callable[[Any], ResolvedStep],
        is_captured: bool,
        *given: Any,
    ) -> Any:
        """The results of a call.

        Args:
            key: whatever decides about the step besides layouts and addresses.
            tensors: the caller's.
            out: tensors that take the results, "ring" for those of the sampler, or None for new ones.
            form: of the results; it is asked for a ring alone.
            resolve: checks all arguments and chooses the step, for tensors that take the results.
            is_captured: whether the current stream is being captured.
            given: to the step, before ``out``.
        """
        if not isinstance(out, str):
            return self.step(key, tensors, out, resolve, is_captured)(*given, out)
        ring = self._ring(out, form(), is_captured)
        results = self.step(key, tensors, ring.oldest, resolve, is_captured)(*given, ring.oldest)
        ring.turn()
        return results

    def step(
        self,
        key: tuple[Any, ...],
        tensors: tuple[Tensor | None, ...],
        out: Any,
        resolve: Callable[[Any], ResolvedStep],
        is_captured: bool,
    ) -> ResolvedStep:
        """The step that serves all calls which a check and the choice of a variant cannot tell from this one."""
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
            return resolve(out)
        step = resolve(out)
        if self._count >= MOST_CALLS:
            self._steps.clear()
            self._count = 0
        self._steps.setdefault(full_key, []).append((alike(present), step))
        self._count += 1
        return step

    def _ring(self, out: str, form: ResultForm, is_captured: bool) -> ResultRing:
        """The ring that a caller asks for by ``out="ring"``."""
        if out != "ring":
            raise TypeError(f"out must be {form.kind.__name__} or 'ring', got {out!r}; None returns new tensors")
        if is_captured:
            raise RuntimeError(
                "out must not be 'ring' inside a capture, whose replays would all write into one entry; pass tensors, "
                "or None for results in the memory of the graph"
            )
        if form not in self._rings:
            if len(self._rings) >= _MOST_RINGS:
                self._rings.clear()
            kind, rows, columns, stops, logprobs = form
            fields: dict[str, Any] = {"rows": rows, "stops": stops, "logprobs": logprobs}
            with torch.inference_mode(False):  # a tensor made under inference mode could not be written outside of it
                entries = [empty_outputs(kind, columns, self._device, **fields) for _ in range(RING_LEN)]
            self._rings[form] = ResultRing(entries)
        return self._rings[form]


class ResultRing:
    """Results of one form in tensors of the sampler, which come back in turn."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries, self._oldest = entries, 0

    @property
    def oldest(self) -> Any:
        """The results that were written longest ago."""
        return self._entries[self._oldest]

    def turn(self) -> None:
        """Count the oldest results as written; not after a call that failed, as they may be the last ones."""
        self._oldest = (self._oldest + 1) % RING_LEN
