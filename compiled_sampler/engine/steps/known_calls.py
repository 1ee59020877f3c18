"""Calls whose arguments were checked: later ones with tensors of the same layouts run without another check."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Generic, TypeVar

from torch import Tensor, is_inference_mode_enabled

Call = TypeVar("Call")
_MOST_CALLS = 256  # kept at once; an engine whose logits are new tensors each step brings new addresses


class KnownCalls(Generic[Call]):
    """Prepared calls of one kind of step, by the layouts of the tensors that they were checked with."""

    def __init__(self) -> None:
        """Know nothing."""
        self._calls: dict[Hashable, Call] = {}

    def key(
        self, step: Hashable, generation: int, is_captured: bool, tensors: Iterable[Tensor | None], out: Any
    ) -> Hashable | None:
        """All that a check and the choice of a variant depend on; None where an argument is no tensor.

        Args:
            step: the mode, the shape of the plan and whatever else decides.
            generation: of the runner, see ``StepRunner.generation``.
            is_captured: whether the current stream is being captured.
            tensors: the caller's.
            out: tensors that take the results; None for new ones, ``RING`` for those of a ring.
        """
        try:
            into = out if out is None or isinstance(out, str) else (type(out), layouts_of(out))
            return step, generation, is_captured, is_inference_mode_enabled(), layouts_of(tensors), into
        except (AttributeError, TypeError, RuntimeError):  # the check says what is wrong
            return None

    def get(self, key: Hashable | None) -> Call | None:
        """The call that was put here for equal arguments; None if there is none."""
        try:
            return None if key is None else self._calls.get(key)
        except TypeError:  # not hashable after all
            return None

    def put(self, key: Hashable | None, call: Call) -> None:
        """Keep a call for arguments that were checked."""
        if key is None:
            return
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        self._calls[key] = call


def layouts_of(fields: Iterable[Any]) -> tuple[Hashable, ...]:
    """Where and how each tensor lies in memory; None for a field that is None, and layouts for a tuple of tensors.

    One comprehension: a call for each tensor would take a third of the time more, in every step.
    """
    return tuple(
        [
            layouts_of(each)
            if isinstance(each, tuple)
            else None
            if each is None
            else (each.data_ptr(), each.shape, each.stride(), each.dtype, each.device, each.is_neg())
            for each in fields
        ]
    )
