"""The tensors that edits get with a call: the mask, and the inputs of the user's edits, by the names of a step's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_sampler.edit_names import CONSUMES, MASK, RESTORES, Leave, without_vain_leave
from compiled_sampler.engine.boundary.tensors import check_token_bitmask
from compiled_sampler.engine.plans.plan import Plan
from compiled_sampler.engine.requests.custom_edits import CustomEditSet
from compiled_sampler.logprobs import Logprobs

CallTensors = Mapping[str, Tensor]
"""By name: ``MASK`` for the mask, ``edit_inputs.name`` for an input of an edit."""

OfEdits = tuple[Tensor | None, Mapping[str, Tensor] | None]
"""``token_bitmask`` and ``edit_inputs`` of a call, as the caller gave them."""


class CallReader:
    """Finds and checks what the edits of a batch get with its call.

    Args:
        custom: the edits of the user.
        vocab_size: V.
        device: of the sampler.
    """

    def __init__(self, custom: CustomEditSet, vocab_size: int, device: torch.device) -> None:
        """Keep what is declared."""
        self._custom, self._vocab_size, self._device = custom, vocab_size, device

    def read(
        self, plan: Plan, token_bitmask: Tensor | None, edit_inputs: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        """The tensors of a call that its batch reads; those of edits that no request has are passed over.

        Raises:
            TypeError, ValueError: ``edit_inputs`` that no edit of the sampler has.
        """
        given = {} if token_bitmask is None else {MASK: token_bitmask}
        return given if edit_inputs is None else {**given, **self._custom.given(plan.edits, edit_inputs)}

    @property
    def states(self) -> tuple[Tensor, ...]:
        """The tensors by slot that edits read and an engine has too: no step may write there, whatever its batch."""
        return self._custom.states.every

    def check(self, plan: Plan, given: CallTensors, rows: int) -> None:
        """Raise unless the batch has all that its edits read, in the right form.

        Raises:
            TypeError, ValueError: a tensor that is not given; another dtype, shape or device.
        """
        if MASK in given:
            check_token_bitmask(given[MASK], rows, self._vocab_size, self._device)
        self._custom.check_given(plan.edits, given, rows, self._device)


def edits_of(
    plan: Plan, given: CallTensors, leave: Leave = False, logprobs: Logprobs | None = None, by_row: bool = True
) -> tuple[str, ...]:
    """The edits of a call: those of the plan's requests, the mask if one is given, and leave to write the logits."""
    edits = (MASK, *plan.edits) if MASK in given else plan.edits
    if leave is False:
        return edits
    reads_raw = isinstance(logprobs, Logprobs) and logprobs.of == "raw"
    return without_vain_leave((CONSUMES if leave is True else RESTORES, *edits), reads_raw=reads_raw, by_row=by_row)
