"""Results in tensors of the sampler that come back in turn, ``out="ring"``: a replay then writes them in place."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeGuard

import torch

from compiled_sampler.engine.boundary.outputs import empty_outputs

Ring = Literal["ring"]
RING: Ring = "ring"
"""What a caller passes as ``out``."""
RING_LEN = 2
"""Steps whose results are there at once: one is read while the next one runs. Each is a captured variant more."""
_MOST_RINGS = 64  # of results of one form; a caller that brings another form each time has others made

Run = Callable[[Any, Any, Any], Any]
"""A prepared step, ``run(plan, given, out)``."""
Prepare = Callable[[Any, Any, Any], Run]
"""What checks a call and prepares its step, ``prepare(plan, given, out)``."""


def is_ring(out: object) -> TypeGuard[Ring]:
    """Whether a caller asks for the results of a ring."""
    return isinstance(out, str) and out == RING


class ResultRing:
    """Results of one form, in turn.

    Args:
        entries: the results, ``RING_LEN``.
    """

    def __init__(self, entries: list[Any]) -> None:
        """Begin with the first."""
        self._entries, self._next = entries, 0

    def oldest(self) -> tuple[int, Any]:
        """The index and the results of the entry that was written longest ago."""
        return self._next, self._entries[self._next]

    def turn(self) -> None:
        """Count the oldest entry as written."""
        self._next = (self._next + 1) % RING_LEN


class ResultRings:
    """The rings of a sampler, by the form of the results.

    Args:
        device: of the sampler.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate nothing."""
        self._device = device
        self._rings: dict[Hashable, ResultRing] = {}

    def of(self, kind: Any, rows: int, columns: int, **fields: Any) -> ResultRing:
        """The ring of a form; arguments as for ``empty_outputs``."""
        key = kind, rows, columns, *fields.items()
        if key not in self._rings:
            if len(self._rings) >= _MOST_RINGS:
                self._rings.clear()
            with torch.inference_mode(False):  # a tensor made under inference mode could not be written outside of it
                made = [empty_outputs(kind, columns, self._device, rows=rows, **fields) for _ in range(RING_LEN)]
            self._rings[key] = ResultRing(made)
        return self._rings[key]

    def prepared(
        self, prepare: Prepare, call: tuple[Any, Any, Any], is_captured: bool, form: Callable[[], tuple[Any, ...]]
    ) -> Run:
        """The checked step for a call and for those like it, which writes into a ring in turn if ``out`` is ``RING``.

        Args:
            prepare: ``prepare(plan, given, out)``, the checked step for a call that writes into ``out``.
            call: the plan, what else is given, and ``out``.
            is_captured: whether the current stream is being captured.
            form: returns the kind of the results, their columns and the further fields, as for ``empty_outputs``; it is
                called once the arguments are checked.

        Raises:
            RuntimeError: a ring inside a capture.
        """
        plan, given, out = call
        if not is_ring(out):
            return prepare(plan, given, out)
        run = prepare(plan, given, None)
        if not plan.slots:
            return run
        check_not_captured(is_captured)
        kind, columns, fields = form()
        return RingCall(self.of(kind, len(plan.slots), columns, **fields), prepare)


class RingCall:
    """A prepared step that writes the results of each call into the next entry of a ring.

    Args:
        ring: of the results.
        prepare: ``prepare(plan, given, out)``, the checked step for one entry; called once for each.
    """

    def __init__(self, ring: ResultRing, prepare: Prepare) -> None:
        """Prepare nothing."""
        self._ring, self._prepare = ring, prepare
        self._runs: list[Run | None] = [None] * RING_LEN

    def __call__(self, plan: Any, given: Any, out: Any) -> Any:
        """The results of a call, whose ``out`` is ``RING``."""
        index, into = self._ring.oldest()
        run = self._runs[index]
        if run is None:
            run = self._runs[index] = self._prepare(plan, given, into)
        made = run(plan, given, into)
        self._ring.turn()  # only now: a call that fails takes no entry, whose results may be the last ones
        return made


def check_not_captured(is_captured: bool) -> None:
    """Raise if a step that writes into a ring is being captured.

    Raises:
        RuntimeError: it is: each replay would write into the same entry, and steps beside it would not know.
    """
    if is_captured:
        raise RuntimeError(
            "out must not be 'ring' inside a capture, whose replays would all write into one entry; pass tensors, or "
            "None for results in the memory of the graph"
        )
