"""What calls share with earlier ones: checks that need not be made again, and results that come back in turn."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled

from compiled_sampler.engine.boundary.outputs import empty_outputs
from compiled_sampler.lowering.inductor.layout_guards import alike

Run = TypeVar("Run")
Ring = Literal["ring"]
MOST_CALLS = 1024  # an engine whose logits are new tensors each step brings new addresses
RING_LEN = 2
"""Steps whose results are there at once: one is read while the next one runs."""
_MOST_RINGS = 64  # of results of one form; a caller that brings another form each time has others made


class NewCall(NamedTuple):
    """A call that was not checked before: what ``CheckedCalls.put`` needs."""

    key: Hashable
    """What decides besides the layouts, and where all tensors lie."""
    tensors: list[Tensor]
    """The caller's, with those of ``out``."""


class CheckedCalls(Generic[Run]):
    """Steps that were chosen for checked arguments, by the layouts and addresses of these. It saves 30 us a step."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, list[tuple[Callable[..., bool], Run]]] = {}
        self._count = 0
        self._generation: Any = None

    def find(
        self, key: Hashable, tensors: tuple[Tensor | None, ...], out: tuple[Any, ...] | None, generation: Any
    ) -> tuple[NewCall | None, Run | None]:
        """The step that was put here for all that a check and the choice of a variant see; else what ``put`` takes.

        Args:
            key: whatever else decides: the mode, the shape of the plan, how many tensors there are, whether the current
                stream is being captured.
            tensors: the caller's.
            out: tensors that take the results; None for new ones.
            generation: of the runner; steps of another one are forgotten, with the graphs that they hold.

        Returns:
            None and the step; what is new and None; None twice where an argument is no tensor.
        """
        if generation != self._generation:
            self._runs.clear()
            self._count, self._generation = 0, generation
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
            full_key = key, modes, type(out), *addresses
            for is_alike, run in self._runs.get(full_key, ()):
                if is_alike(*present):
                    return None, run
            return NewCall(full_key, present), None
        except (AttributeError, TypeError, RuntimeError):  # the check says what is wrong
            return None, None

    def put(self, new: NewCall | None, run: Run) -> None:
        """Keep the step for arguments that were checked."""
        if new is None:
            return
        if self._count >= MOST_CALLS:
            self._runs.clear()
            self._count = 0
        self._runs.setdefault(new.key, []).append((alike(new.tensors), run))
        self._count += 1


class ResultRing:
    """Results of one form in tensors of the sampler, which come back in turn: a replay then writes them in place."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries, self._oldest = entries, 0

    @property
    def oldest(self) -> Any:
        """The results that were written longest ago."""
        return self._entries[self._oldest]

    def turn(self) -> None:
        """Count the oldest results as written; not after a call that failed, as they may be the last ones."""
        self._oldest = (self._oldest + 1) % RING_LEN


class ResultRings:
    """The rings of a sampler, by the form of the results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rings: dict[Hashable, ResultRing] = {}

    def named(self, out: str, kind: Any, rows: int, columns: int, is_captured: bool, **fields: Any) -> ResultRing:
        """The ring that a caller asks for by ``out="ring"``; arguments as for ``empty_outputs``."""
        if out != "ring":
            raise TypeError(f"out must be {kind.__name__} or 'ring', got {out!r}; None returns new tensors")
        if is_captured:
            raise RuntimeError(
                "out must not be 'ring' inside a capture, whose replays would all write into one entry; pass tensors, "
                "or None for results in the memory of the graph"
            )
        form = kind, rows, columns, *fields.items()
        if form not in self._rings:
            if len(self._rings) >= _MOST_RINGS:
                self._rings.clear()
            with torch.inference_mode(False):  # a tensor made under inference mode could not be written outside of it
                entries = [empty_outputs(kind, columns, self._device, rows=rows, **fields) for _ in range(RING_LEN)]
            self._rings[form] = ResultRing(entries)
        return self._rings[form]
