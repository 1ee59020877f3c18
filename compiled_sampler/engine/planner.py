"""Requests in slots, and plans for batches of them: everything that is decided on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.engine.plan import Plan, covering_mode, forced_mode
from compiled_sampler.engine.slots import SlotState
from compiled_sampler.engine.validation import (
    are_ints,
    check_not_capturing,
    check_num_drafts,
    check_plan_buffers,
    checked_slot,
    checked_slots,
)
from compiled_sampler.modes import Mode
from compiled_sampler.params import SamplingParams

_MOST_PLANS = 64  # plans kept while no request comes or goes
_FROZEN = "inside a capture, which would freeze it; do so before it begins"


class Planner:
    """Holds requests and plans batches.

    Args:
        modes: the mode table.
        num_slots: S, requests held at once.
        device: where the slot table and the plans' tensors live.
    """

    def __init__(self, modes: tuple[Mode, ...], num_slots: int, device: torch.device) -> None:
        """All slots free."""
        self.modes, self.device = modes, device
        self._state = SlotState(num_slots, modes, device)
        self._plans: dict[Any, Plan] = {}
        self._plans_epoch = self._state.epoch

    def add_request(self, params: SamplingParams) -> int:
        """Hold a request; returns its slot. A seed of None is drawn from ``os.urandom``, see ``request``.

        Raises:
            RuntimeError: no slot is free, or the current stream is being captured.
            TypeError: ``params`` is no ``SamplingParams``.
        """
        check_not_capturing(self.device, f"a request must not be added {_FROZEN}")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {type(params).__name__}; SamplingParams(**options)")
        return self._state.add(params)

    def remove_request(self, slot: int) -> None:
        """Free a slot; plans that name it are stale from now on.

        Raises:
            TypeError: the slot is no int.
            ValueError: no request holds the slot.
        """
        self._state.remove(checked_slot(slot))

    def request(self, slot: int) -> SamplingParams:
        """The parameters in a slot, with the seed that is used.

        Raises:
            TypeError: the slot is no int.
            ValueError: no request holds the slot.
        """
        return self._state.request(checked_slot(slot))

    def plan(self, slots: Sequence[int], mode: str | None = None, num_drafts: Sequence[int] | None = None) -> Plan:
        """Choose the mode for a batch, on the host alone; while nothing changes the same plan is returned.

        Args:
            slots: the slot of each row; a slot may stand in several rows, -1 is padding.
            mode: the name of a mode to force; None takes the cheapest that covers the batch.
            num_drafts: for ``verify``: how many drafts each request has, 0 or more; the batch then has one row of
                logits for each draft and one more for each request, in their order.

        Raises:
            RuntimeError: the plan is new and the current stream is being captured.
            TypeError: a slot or a number of drafts that is no int.
            ValueError: a slot without a request; a mode that is unknown or does not cover a row; a wrong count.
        """
        if self._plans_epoch != self._state.epoch:
            self._plans.clear()
            self._plans_epoch = self._state.epoch
        if num_drafts is not None and not isinstance(num_drafts, Sequence):
            raise TypeError(f"num_drafts must be a sequence of ints, got {num_drafts!r}; one count a slot")
        slots = checked_slots(slots)
        if num_drafts is not None and not are_ints(num_drafts):  # True and 1 are the same key
            check_num_drafts(num_drafts, len(slots))
        key = (mode, slots, None if num_drafts is None else tuple(num_drafts))
        return self._plans.get(key) or self._new_plan(*key)

    def check_current(self, plan: Plan) -> None:
        """Raise unless the plan is of this planner, its requests are still held, and buffers in it fit it.

        Raises:
            TypeError: it is no plan, or a buffer of another dtype.
            ValueError: it is not, and the message names the row; or a buffer of another shape or device.
        """
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be a Plan, got {type(plan).__name__}; sampler.plan(slots) makes one")
        if plan.owner is not self._state:
            raise ValueError("plan must come from this sampler's plan(), got one of another sampler; make a new plan")
        if plan.epoch != self._state.epoch and plan.generations != self._state.holders(plan.slots):
            now = self._state.holders(plan.slots)
            row = next(i for i, pair in enumerate(zip(plan.generations, now, strict=True)) if pair[0] != pair[1])
            raise ValueError(
                f"plan must name requests that are still held; the request of row {row} (slot {plan.slots[row]}) was "
                "removed; make a new plan"
            )
        if not (plan.has_planned_slots and plan.has_planned_counts):
            check_plan_buffers(plan, self.device)

    def _new_plan(self, name: str | None, slots: tuple[int, ...], num_drafts: tuple[int, ...] | None) -> Plan:
        check_not_capturing(self.device, f"a new plan must not be made {_FROZEN}")
        check_num_drafts(num_drafts, len(slots))
        needs = self._state.uncovered(slots)
        if name is None:
            mode = covering_mode(self.modes, needs)
        else:
            mode = forced_mode(self.modes, name, needs, slots, self._state.params)
        planned = self._on_device(slots), None if num_drafts is None else self._on_device(num_drafts)
        plan = Plan(
            slots,
            mode,
            planned[0],
            num_drafts,
            planned[1],
            self._drafted(num_drafts or ()),
            planned,
            self._state.holders(slots),
            self._state,
            self._state.epoch,
        )
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[name, slots, num_drafts] = plan
        return plan

    def _drafted(self, num_drafts: tuple[int, ...]) -> Tensor | None:
        width = max(num_drafts, default=0)
        if all(count == width for count in num_drafts):
            return None
        return self._on_device(tuple(n * width + j for n, count in enumerate(num_drafts) for j in range(count)))

    def _on_device(self, numbers: tuple[int, ...]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self.device, non_blocking=True)
