"""Calls whose arguments were checked: later ones with tensors of the same layouts run without another check."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from compiled_sampler.engine.boundary.capture import is_capturing

Call = TypeVar("Call")
_MOST_CALLS = 256  # kept at once; an engine whose logits are new tensors each step brings new addresses


class KnownCalls(Generic[Call]):
    """Prepared calls of one kind of step, by the layouts of the tensors that they were checked with.

    Args:
        device: of the sampler.
    """

    def __init__(self, device: torch.device) -> None:
        """Know nothing."""
        self._device = device
        self._calls: dict[Hashable, Call] = {}

    def key(self, step: Hashable, generation: int, tensors: Iterable[Tensor | None], out: Any) -> Hashable | None:
        """All that a check and the choice of a variant depend on; None where an argument is no tensor.

        Args:
            step: the mode, the shape of the plan and whatever else decides.
            generation: of the runner, see ``StepRunner.generation``.
            tensors: the caller's.
            out: tensors that take the results; None for new ones.
        """
        try:
            into = None if out is None else (type(out), *map(_layout_of_field, out))
            given = tuple(map(layout_of, tensors))
        except (AttributeError, TypeError, RuntimeError):  # the check says what is wrong
            return None
        state = is_capturing(self._device), torch.is_inference_mode_enabled()
        return step, generation, state, given, into

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


def _layout_of_field(field: Any) -> Hashable:
    """``layout_of`` a field of ``out``, of each field of a tuple in it; None of one that is left out."""
    if field is None:
        return None
    return tuple(map(_layout_of_field, field)) if isinstance(field, tuple) else layout_of(field)


def layout_of(tensor: Any) -> Hashable:
    """Where and how a tensor lies in memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg()
