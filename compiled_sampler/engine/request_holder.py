"""The part of a sampler that an engine uses between steps: requests in slots, and plans for batches of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from compiled_sampler.engine.boundary.arguments import (
    capture_check,
    check_mode_name,
    check_not_capturing,
    checked_counts,
    checked_params,
    checked_slot,
    checked_slots,
    checked_tokens,
    sum_and_width,
    words_of_counts,
)
from compiled_sampler.engine.plan import (
    Plan,
    PlanOrigin,
    check_once,
    check_plan_buffers,
    check_replaced,
    check_served,
)
from compiled_sampler.engine.requests.edit_slots import EditSlots
from compiled_sampler.engine.requests.slots import (
    SlotState,
    named_edits,
    uncovered_modes,
    words_of_slots,
)
from compiled_sampler.engine.requests.uploads import DeviceReserve, PlannedTensors, room
from compiled_sampler.modes import PROBABILITIES, Mode, covering_mode, forced_mode
from compiled_sampler.params import SamplingParams
from compiled_sampler.shard import VocabularyShard

_MOST_PLANS = 64  # plans kept at once
_MOST_BATCH_KINDS = 4096  # of batches that are kept
_FROZEN = "must not be {} inside a capture, which would freeze it; do so before it begins"
_ADDED, _PLANNED = "a request " + _FROZEN.format("added"), "a new plan " + _FROZEN.format("made")
_CALLED = _FROZEN.format("called")
BatchKind = tuple[Mode, tuple[str, ...], tuple[str, ...]]
"""What serves batches that need the same: the mode, the edits, and those of them that do not promise equal bits."""


class RequestHolder:
    """Holds requests in slots and plans batches of them; ``Sampler`` adds the steps."""

    def __init__(
        self,
        modes: tuple[Mode, ...],
        num_slots: int,
        device: torch.device,
        generator: torch.Generator | None,
        edits: EditSlots,
        most_rows: int,
        checked_by: VocabularyShard | None,
    ) -> None:
        # ``modes`` cheapest first; ``most_rows`` of a captured step, whose slots and numbers of drafts the host writes;
        # ``checked_by`` compares plans with those of other ranks
        self.modes, self.device, self._edits = modes, device, edits
        self._is_capturing = capture_check(device)
        self._requests = SlotState(num_slots, modes, device, generator, edits, most_rows)
        self._plans: dict[Any, Plan] = {}  # a plan that is made again costs 12 us, and an upload
        self._batch_kinds: dict[Any, BatchKind] = {}
        self._planned_at = 0  # the epoch of the requests that they are of
        self._uploads_at_once = False
        self._reserve, self._checked_by = DeviceReserve(device) if device.type == "cuda" else None, checked_by
        self._captured: set[Plan] = set()  # graphs of an engine read their tensors, and do not hold them

    def __reduce__(self) -> NoReturn:
        """Refuse ``copy.copy`` and all else that copies."""
        self._requests.__reduce__()

    @property
    def num_free_slots(self) -> int:
        """The number of requests that may yet be added before one must be removed."""
        return self._requests.num_free

    def add_request(
        self, params: SamplingParams, prompt_token_ids: Iterable[int] = (), output_token_ids: Iterable[int] = ()
    ) -> int:
        """The slot of a new request, which stays held until ``remove_request``.

        Penalties, bad words and ``min_tokens`` need its tokens: the prompt stands at positions 0, 1, ..., behind it
        what was drawn, and the next token is drawn at the position behind both. A request that was preempted is added
        again with all of them. An id of V or more keeps its position and counts for nothing: prompts of multimodal
        models hold placeholders that no logit has.

        Args:
            params: of the request; a seed of None is replaced by one from ``default_generator``, or from ``os.urandom``
                without one. ``request`` returns it.
            prompt_token_ids: of the prompt.
            output_token_ids: that were drawn for the request before.

        Raises:
            RuntimeError: no slot is free, or the current stream is being captured.
            TypeError: ``params`` is no ``SamplingParams``, tokens are no sequence of ints.
            ValueError: edits without room, see ``EditSizes``; edits of a token id of V or more, or
                ``allowed_token_ids`` that are all such ids; no ``history_len``, or more tokens than that.
        """
        if self._is_capturing():
            raise RuntimeError(_ADDED)
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {type(params).__name__}; SamplingParams(**options)")
        prompt = checked_tokens("prompt_token_ids", prompt_token_ids)
        slot = self._requests.add(params, prompt, checked_tokens("output_token_ids", output_token_ids))
        if self._uploads_at_once:
            try:
                self._requests.upload()
            except BaseException:
                self._requests.remove(slot)  # nobody else knows it
                raise
        return slot

    def set_history(self, slot: int, position: int, token_ids: Iterable[int]) -> None:
        """Write tokens that this sampler did not draw into the history of a request, from a position on.

        What stood behind them is forgotten, as after an edit of the text. Tokens drawn by ``sample``, ``draft`` and
        ``verify`` are written by these. An id of V or more counts for nothing. It does not wait, but launches about a
        hundred kernels for each 64 tokens.

        Raises:
            RuntimeError: the current stream is being captured.
            TypeError: a slot, position or token that is no int.
            ValueError: no request holds the slot; a position beyond ``history_len``.
        """
        check_not_capturing(self.device, f"set_history() {_CALLED}")
        self._requests.request(checked_slot(slot))
        self._requests.upload()
        self._edits.set_history(int(slot), position, checked_tokens("token_ids", token_ids))

    def edit_state(self, name: str) -> Tensor:
        """The tensor ``[S, ...]`` of a state that one of the edits declares, to read and write between steps.

        It is the memory that steps read, captured ones too, at one address for the life of the sampler. ``add_request``
        sets the slot of a request with the edit to the initial value, on the current stream; what is written afterwards
        counts from the next step on, if it is written on the stream of the steps.

        Raises:
            ValueError: no edit of the sampler declares it.
        """
        return self._edits.custom.states.tensor(name)

    def remove_request(self, slot: int) -> None:
        """Free a slot; plans that name it are refused from now on.

        A step of the request may still be in flight: this writes on the host alone. The next request's numbers reach
        the slot on the current stream, after that step where the streams are the same.

        Raises:
            TypeError: the slot is no int.
            ValueError: no request holds the slot.
        """
        self._requests.remove(slot if type(slot) is int else checked_slot(slot))

    def request(self, slot: int) -> SamplingParams:
        """The parameters of the request in a slot, with the seed that is used.

        Raises:
            TypeError, ValueError: the slot is no int; no request holds it.
        """
        return self._requests.request(checked_slot(slot))

    def flush(self) -> None:
        """Bring the parameters of added requests to the device now, without a wait.

        Every step does so first, or its graph does; from the first step on that an engine captures, ``add_request``
        does. So only an engine that captures a step itself needs to call it, after it has added requests.

        Raises:
            RuntimeError: the current stream is being captured.
        """
        check_not_capturing(self.device, f"flush() {_CALLED}")
        self._requests.upload()

    def mode_for(self, params: SamplingParams | Sequence[SamplingParams]) -> Mode:
        """The mode that would serve a batch of such requests; none is added, and no seed is drawn.

        Args:
            params: of one request or of several; of none, the cheapest mode.

        Raises:
            TypeError: something else than ``SamplingParams``.
        """
        needs = 0
        for request in checked_params(params):
            needs |= uncovered_modes(self.modes, request)
        return covering_mode(self.modes, needs)

    def plan(
        self,
        slots: Sequence[int],
        mode: str | None = None,
        num_drafts: Sequence[int] | None = None,
        *,
        edits: Collection[str] | None = None,
    ) -> Plan:
        """The plan of a batch, made on the host; with ``check_plans`` it is compared with those of the other ranks.

        The same arguments return the same plan again, until a request is added or removed, or a new plan comes when 64
        are kept: then all of them are forgotten. A plan that the caller holds stays good.

        Args:
            slots: the slot of each row, with ``num_drafts`` of each request; -1 is padding, slots may repeat.
            mode: name of the mode to use; None for the cheapest that covers the batch.
            num_drafts: for ``verify``: k_n >= 0 drafts of each request, which then has k_n + 1 rows of logits.
            edits: names as of ``captured_edits``, all that the steps of the plan serve, for a step that the engine
                captures and later reads other slots (``Plan.slot_ids``): a request with another edit, or one that the
                mode does not cover, then draws nothing and gets ``RowStatus.NOT_COVERED``. A mask and leave to write
                logits come with the call; their names say nothing here. None: those of the requests of the plan, so
                none for padding.

        Raises:
            RuntimeError: the plan is new and the current stream is being captured; ranks disagree, on each of them.
            TypeError: a slot or a number of drafts that is no int.
            ValueError: a slot without a request; a mode that is unknown or does not cover a row; a wrong count;
                edits that are unknown, need a history that there is none of, or lack one that a request has.
        """
        if self._checked_by is not None:
            return self._compared_plan(self._checked_by, slots, mode, num_drafts, edits)
        return self._plan(slots, mode, num_drafts, edits)

    def _compared_plan(self, shard: VocabularyShard, *batch: Any) -> Plan:
        told: Any = None
        try:
            plan = self._plan(*batch)
            requests = [(slot, self._requests.params[slot]) for slot in plan.slots if slot >= 0]
            told = plan.slots, plan.mode.name, plan.num_drafts, plan.edits, repr(requests)
        finally:  # also if there is none on this rank, so that no other rank waits for it
            every = shard.told(told)
        if any(other != told for other in every):
            shown = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(every))
            raise RuntimeError(f"ranks must plan the same batch, got {shown}; add and plan requests in one order")
        return plan

    def _plan(
        self,
        slots: Sequence[int],
        mode: str | None,
        num_drafts: Sequence[int] | None,
        edits: Collection[str] | None,
    ) -> Plan:
        if mode is not None:
            check_mode_name(mode)
        served = None if edits is None else self._edits.served(edits)
        ids = checked_slots(slots)
        words, counts, count_words = words_of_slots(ids), None, None
        if num_drafts is not None:
            counts = checked_counts(num_drafts)
            count_words = words_of_counts(counts)
        if self._planned_at != self._requests.epoch:
            self._plans.clear()
            self._planned_at = self._requests.epoch
        key = words, mode, count_words, served
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        if self._is_capturing():
            raise RuntimeError(_PLANNED)
        best, needed, inexact = self._kind(self._requests.needs_of_batch(ids, words), mode, served, ids)
        if self._requests.is_pending:
            self._requests.upload_before_step()
        numbers, num_proposals, width = {"slots": words}, 0, 0
        if counts is not None and count_words is not None:
            num_proposals, width = sum_and_width(count_words, counts, len(ids))
            numbers["num_drafts"] = count_words
        if needed:
            check_once(needed, ids)
        draft_sizes = () if counts is None else (len(ids), num_proposals, len(ids) * width)
        place = None if self._reserve is None else self._reserve.promise(room(len(ids), *draft_sizes))
        origin = PlanOrigin(self._requests, self._requests.epoch, words, (ids, best, counts, needed, inexact))
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        plan = self._plans[key] = Plan.of(origin, PlannedTensors(numbers, self.device, place), num_proposals, width)
        return plan

    def _kind(
        self, needs: int, mode_name: str | None, served: tuple[str, ...] | None, slots: Sequence[int]
    ) -> BatchKind:
        """What serves a batch; remembered, it saves 15 us.

        What its steps do not serve is brought to the device: a capture may be the first to run one.
        """
        key = needs, mode_name, served
        kind = self._batch_kinds.get(key)
        if kind is not None:
            return kind
        custom = self._edits.custom
        own = named_edits(needs, custom.all_names)
        edits = own if served is None else served
        check_served(own, edits)
        if mode_name is None:
            mode = covering_mode(self.modes, needs)
        else:
            mode = forced_mode(self.modes, mode_name, needs, slots, self._requests.params)
        self._edits.prepare(edits)
        for name in (mode.name, PROBABILITIES):
            self._requests.table_for(name, edits)
        if len(self._batch_kinds) >= _MOST_BATCH_KINDS:
            self._batch_kinds.clear()
        kind = self._batch_kinds[key] = mode, edits, tuple(name for name in custom.inexact if name in edits)
        return kind

    def _check_current(self, plan: Plan) -> bool:
        """Whether the current stream is being captured.

        It raises unless this sampler made the plan, its requests are still held, and the engine's buffers in it fit.

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
        if origin.owner is not self._requests:
            raise ValueError("plan must come from this sampler's plan(), got one of another sampler; make a new plan")
        if plan.held_at != self._requests.epoch:
            stale = origin.gone()
            if stale.any():
                row = int(stale.argmax())
                raise ValueError(
                    f"plan must name requests that are still held; the request of row {row} (slot {plan.slots[row]}) "
                    "was removed; make a new plan"
                )
            plan.__dict__["held_at"] = self._requests.epoch
        if plan.replaced:
            check_plan_buffers(plan, self.device, len(self._requests.params))
        is_captured = self._is_capturing()
        if is_captured:
            self._uploads_at_once = True
            if self._requests.is_pending or self._requests.staged.mirror.is_pending:
                raise RuntimeError(
                    "requests must not be waiting for their upload inside a capture, which would freeze it; call "
                    "flush() before it begins"
                )
            self._captured.add(plan)
        if self._requests.is_pending:
            self._requests.upload_before_step()
        return is_captured
