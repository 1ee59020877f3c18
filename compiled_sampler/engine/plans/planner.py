"""The host side of a sampler: requests in slots, and plans for batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from compiled_sampler.engine.boundary.arguments import (
    check_mode_name,
    checked_counts,
    checked_params,
    checked_slot,
    checked_slots,
    checked_tokens,
    sum_and_width,
    words_of_counts,
)
from compiled_sampler.engine.boundary.capture import capture_check, check_not_capturing
from compiled_sampler.engine.plans.mode_choice import covering_mode, forced_mode
from compiled_sampler.engine.plans.plan import Plan, PlanOrigin
from compiled_sampler.engine.plans.plan_checks import check_once, check_plan_buffers, check_replaced
from compiled_sampler.engine.plans.planned_slots import PlannedSlots
from compiled_sampler.engine.requests.edit_slots import EditSlots
from compiled_sampler.engine.requests.slots import SlotState, named_edits, uncovered_modes, words_of_slots
from compiled_sampler.engine.requests.uploads import DeviceReserve, PlannedTensors, StagedTable, room
from compiled_sampler.modes import Mode
from compiled_sampler.params import SamplingParams

_MOST_PLANS = 64  # plans kept at once
_MOST_KINDS = 4096  # of batches that are kept
_FROZEN = "must not be {} inside a capture, which would freeze it; do so before it begins"
_ADDED, _PLANNED = "a request " + _FROZEN.format("added"), "a new plan " + _FROZEN.format("made")
_CALLED = _FROZEN.format("called")


class Planner:
    """Holds requests and plans batches of them.

    Args:
        modes: the mode table.
        num_slots: S, requests held at once.
        device: of the slot table and of the plans' tensors.
        generator: that seeds of None are drawn from; None for the operating system.
        edits: of the requests.
    """

    def __init__(
        self,
        modes: tuple[Mode, ...],
        num_slots: int,
        device: torch.device,
        generator: torch.Generator | None,
        edits: EditSlots,
    ) -> None:
        """Create free slots."""
        self._modes, self._device, self._edits = modes, device, edits
        self._is_capturing = capture_check(device)
        self._state = SlotState(num_slots, modes, device, generator, edits)
        self._batches: dict[bytes, PlannedSlots] = {}
        self._by_identity: dict[int, PlannedSlots] = {}  # the same, by the ids of their tuples of slots
        self._num_plans = 0
        self._served: dict[int, tuple[Mode, tuple[str, ...], tuple[str, ...]]] = {}
        self._uploads_at_once = False
        self._reserve = DeviceReserve(device) if device.type == "cuda" else None
        self._captured: set[Plan] = set()  # graphs of an engine read their tensors, and do not hold them

    @property
    def staged(self) -> StagedTable:
        """The parameters of every request by slot on the device, and how they come there."""
        return self._state.staged

    @property
    def num_free_slots(self) -> int:
        """Slots that no request holds."""
        return self._state.num_free

    def add_request(
        self, params: SamplingParams, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int]
    ) -> int:
        """The slot of a new request; see ``Sampler.add_request``."""
        if self._is_capturing():
            raise RuntimeError(_ADDED)
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {type(params).__name__}; SamplingParams(**options)")
        prompt = checked_tokens("prompt_token_ids", prompt_token_ids)
        slot = self._state.add(params, prompt, checked_tokens("output_token_ids", output_token_ids))
        if self._uploads_at_once:
            try:
                self._state.upload()
            except BaseException:
                self._state.remove(slot)  # nobody else knows it
                raise
        return slot

    def edit_state(self, name: str) -> Tensor:
        """A tensor by slot; see ``Sampler.edit_state``."""
        return self._edits.custom.states.tensor(name)

    def set_history(self, slot: int, position: int, token_ids: Iterable[int]) -> None:
        """Write tokens that were not drawn here; see ``Sampler.set_history``."""
        check_not_capturing(self._device, f"set_history() {_CALLED}")
        self._state.request(checked_slot(slot))
        self._state.upload()
        self._edits.set_history(int(slot), position, checked_tokens("token_ids", token_ids))

    def flush(self) -> None:
        """Bring the parameters of added requests to the device; see ``Sampler.flush``."""
        check_not_capturing(self._device, f"flush() {_CALLED}")
        self._state.upload()

    def remove_request(self, slot: int) -> None:
        """Free a slot; see ``Sampler.remove_request``."""
        self._state.remove(slot if type(slot) is int else checked_slot(slot))

    def request(self, slot: int) -> SamplingParams:
        """The parameters in a slot; see ``Sampler.request``."""
        return self._state.request(checked_slot(slot))

    def mode_for(self, params: SamplingParams | Sequence[SamplingParams]) -> Mode:
        """The mode for a batch of such requests; see ``Sampler.mode_for``."""
        needs = 0
        for each in checked_params(params):
            needs |= uncovered_modes(self._modes, each)
        return covering_mode(self._modes, needs)

    def plan(self, slots: Sequence[int], mode: str | None, num_drafts: Sequence[int] | None) -> Plan:
        """The plan of a batch; see ``Sampler.plan``."""
        if mode is not None:
            check_mode_name(mode)
        batch = self._by_identity.get(id(slots))  # a tuple that is held there, so that no other has its id
        if batch is None:
            ids = checked_slots(slots)
            words = words_of_slots(ids)
            batch = self._batches.get(words) or PlannedSlots(ids, words)
        counts = drafts = None
        if num_drafts is not None:
            counts = checked_counts(num_drafts)
            drafts = words_of_counts(counts)
        if batch.epoch == self._state.epoch:
            kept: Plan | None = batch.plans.get((mode, drafts))
            if kept is not None:
                return kept
        return self._new_plan(batch, mode, counts, drafts)

    def check_current(self, plan: Plan) -> bool:
        """Whether the current stream is being captured.

        It raises unless this planner made the plan, its requests are still held, and the engine's buffers in it fit.

        The parameters of requests that were added reach the device with the step that asks, or before. An engine that
        captures the step replays it without asking, so those of later requests are uploaded as these are added.

        Raises:
            RuntimeError: the current stream is being captured, and parameters are yet to be uploaded.
            TypeError: no plan, or a buffer of another dtype.
            ValueError: a plan of another sampler, or one in which more than buffers was replaced; a removed request,
                whose row is named; a buffer of another shape or device.
        """
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be a Plan, got {type(plan).__name__}; sampler.plan(slots) makes one")
        if plan.replaced:
            check_replaced(plan)
        origin = plan.origin
        if origin.owner is not self._state:
            raise ValueError("plan must come from this sampler's plan(), got one of another sampler; make a new plan")
        if plan.held_at != self._state.epoch:
            stale = origin.gone()
            if stale.any():
                row = int(stale.argmax())
                raise ValueError(
                    f"plan must name requests that are still held; the request of row {row} (slot {plan.slots[row]}) "
                    "was removed; make a new plan"
                )
            plan.__dict__["held_at"] = self._state.epoch
        if plan.replaced:
            check_plan_buffers(plan, self._device, len(self._state.params))
        is_captured = self._is_capturing()
        if is_captured:
            self._uploads_at_once = True
            if self._state.is_pending or self._state.staged.words.is_pending:
                raise RuntimeError(
                    "requests must not be waiting for their upload inside a capture, which would freeze it; call "
                    "flush() before it begins"
                )
            self._captured.add(plan)
        if self._state.is_pending:
            self._state.bring()
        return is_captured

    def _new_plan(
        self, batch: PlannedSlots, name: str | None, num_drafts: tuple[int, ...] | None, drafts: bytes | None
    ) -> Plan:
        """A plan of slots, which is kept; steps then find the parameters of their requests."""
        if self._is_capturing():
            raise RuntimeError(_PLANNED)
        state, slots = self._state, batch.slots
        if state.is_pending:
            state.bring()
        numbers, num_proposals, width = {"slots": batch.words}, 0, 0
        if num_drafts is not None and drafts is not None:
            num_proposals, width = sum_and_width(drafts, num_drafts, len(slots))
            numbers["num_drafts"] = drafts
        if batch.epoch != state.epoch:
            batch.renew(state)
        mode, edits, inexact = self._served.get(batch.needs) or self._serving(batch.needs)
        if name is not None:
            mode = forced_mode(self._modes, name, batch.needs, slots, state.params)
        if edits:
            check_once(edits, slots)
        origin = PlanOrigin(state, batch.epoch, slots, batch.words, mode, num_drafts, edits, inexact)
        place = None
        if self._reserve is not None:
            count = len(slots)
            of_drafts = () if num_drafts is None else (count, num_proposals, count * width)
            place = self._reserve.promise(room(count, *of_drafts))
        plan = Plan.of(origin, PlannedTensors(numbers, self._device, place), num_proposals, width)
        if self._num_plans >= _MOST_PLANS:
            self._forget(batch)
        self._num_plans += 1
        batch.plans[name, drafts] = plan  # for whoever asks again; the slots stay known when requests come and go
        self._batches[batch.words] = self._by_identity[id(slots)] = batch
        return plan

    def _serving(self, needs: int) -> tuple[Mode, tuple[str, ...], tuple[str, ...]]:
        """The cheapest mode for what a batch needs, its edits, and the inexact ones of them.

        All of it is kept, since batches are of few kinds.
        """
        if len(self._served) >= _MOST_KINDS:
            self._served.clear()
        edits = named_edits(needs, self._edits.custom.all_names)
        inexact = tuple(name for name in edits if name in self._edits.custom.inexact)
        made = self._served[needs] = covering_mode(self._modes, needs), edits, inexact
        return made

    def _forget(self, batch: PlannedSlots) -> None:
        """Keep no plan, neither of a batch nor of any other."""
        batch.plans.clear()
        self._batches.clear()
        self._by_identity.clear()
        self._num_plans = 0
