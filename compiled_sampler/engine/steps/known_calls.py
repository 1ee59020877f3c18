"""Calls whose arguments were checked: later ones with tensors of the same layouts run without another check."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor, is_grad_enabled, is_inference_mode_enabled

from compiled_sampler.lowering.inductor.layout_guards import alike

Call = TypeVar("Call")
MOST_CALLS = 256  # kept at once; an engine whose logits are new tensors each step brings new addresses


class NewCall(NamedTuple):
    """A call that is not known: what ``KnownCalls.put`` needs."""

    key: Hashable
    """What decides besides the layouts, and where all tensors lie."""
    tensors: list[Tensor]
    """The caller's, with those of ``out``."""


class KnownCalls(Generic[Call]):
    """Prepared calls of one kind of step, by the layouts of the tensors that they were checked with.

    Args:
        most: are kept at once.
    """

    def __init__(self, most: int = MOST_CALLS) -> None:
        """Know nothing."""
        self._most = most
        self._calls: dict[Hashable, list[tuple[Callable[..., bool], Call]]] = {}
        self._count = 0

    def find(self, step: Hashable, tensors: tuple[Tensor | None, ...], out: Any) -> tuple[NewCall | None, Call | None]:
        """The call that was put here for all that a check and the choice of a variant see; else what ``put`` takes.

        Args:
            step: whatever else decides: the mode, the shape of the plan, how many tensors there are, the generation of
                the runner, whether the current stream is being captured.
            tensors: the caller's.
            out: tensors that take the results; None for new ones, ``RING`` for those of a ring.

        Returns:
            None and the call; what is new and None; None twice where an argument is no tensor.
        """
        is_new = out is None or isinstance(out, str)
        try:
            fields = tensors if is_new else (*tensors, *out)
            if not is_new and isinstance(fields[-1], tuple):  # logprobs of ``out``
                fields = *fields[:-1], *fields[-1]
            places = [None if each is None else each.data_ptr() for each in fields]
            modes = is_inference_mode_enabled(), is_grad_enabled()  # on which it depends what may be written
            key = step, modes, out if is_new else type(out), *places
            given = [each for each in fields if each is not None]
            for is_alike, call in self._calls.get(key, ()):
                if is_alike(*given):
                    return None, call
            return NewCall(key, given), None
        except (AttributeError, TypeError, RuntimeError):  # the check says what is wrong
            return None, None

    def put(self, new: NewCall | None, call: Call) -> None:
        """Keep a call for arguments that were checked."""
        if new is None:
            return
        if self._count >= self._most:
            self._calls.clear()
            self._count = 0
        self._calls.setdefault(new.key, []).append((alike(new.tensors), call))
        self._count += 1
