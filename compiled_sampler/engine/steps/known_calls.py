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

    def find(self, step: Hashable, tensors: tuple[Tensor | None, ...], out: Any) -> tuple[Hashable, Call | None]:
        """A key, and the call that was put here under an equal one: all that a check and the choice of a variant see.

        Args:
            step: whatever else decides: the mode, the shape of the plan, how many tensors there are, the generation of
                the runner, whether the current stream is being captured.
            tensors: the caller's.
            out: tensors that take the results; None for new ones, ``RING`` for those of a ring.

        Returns:
            The key, None where an argument is no tensor; the call, None if there is none.
        """
        is_new = out is None or isinstance(out, str)
        try:
            fields = tensors if is_new else (*tensors, *out)
            key = step, is_inference_mode_enabled(), out if is_new else type(out), layouts_of(fields)
            return key, self._calls.get(key)
        except (AttributeError, TypeError, RuntimeError):  # the check says what is wrong
            return None, None

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
            None
            if each is None
            else layouts_of(each)
            if isinstance(each, tuple)
            else (each.data_ptr(), each.shape, each.stride(), each.dtype, each.device, each.is_neg())
            for each in fields
        ]
    )
