"""The part of a sampler that an engine uses between steps: requests in slots, and plans for batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from compiled_sampler.engine.plans.plan import Plan
from compiled_sampler.engine.plans.planner import Planner
from compiled_sampler.modes import Mode
from compiled_sampler.params import SamplingParams


class RequestHolder:
    """Holds requests in slots and plans batches of them; ``Sampler`` adds the steps.

    Args:
        planner: does the work.
    """

    def __init__(self, planner: Planner) -> None:
        """Keep the planner."""
        self._planner = planner

    @property
    def num_free_slots(self) -> int:
        """The number of requests that may yet be added before one must be removed."""
        return self._planner.num_free_slots

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
        return self._planner.add_request(params, prompt_token_ids, output_token_ids)

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
        self._planner.set_history(slot, position, token_ids)

    def edit_state(self, name: str) -> Tensor:
        """The tensor ``[S, ...]`` of a state that one of the edits declares, to read and write between steps.

        It is the memory that steps read, captured ones too, at one address for the life of the sampler. ``add_request``
        sets the slot of a request with the edit to the initial value, on the current stream; what is written afterwards
        counts from the next step on, if it is written on the stream of the steps.

        Raises:
            ValueError: no edit of the sampler declares it.
        """
        return self._planner.edit_state(name)

    def remove_request(self, slot: int) -> None:
        """Free a slot; plans that name it are refused from now on.

        Raises:
            TypeError: the slot is no int.
            ValueError: no request holds the slot.
        """
        self._planner.remove_request(slot)

    def request(self, slot: int) -> SamplingParams:
        """The parameters of the request in a slot, with the seed that is used.

        Raises:
            TypeError, ValueError: the slot is no int; no request holds it.
        """
        return self._planner.request(slot)

    def flush(self) -> None:
        """Bring the parameters of added requests to the device now, without a wait.

        Every step does so first, or its graph does; from the first step on that an engine captures, ``add_request``
        does. So only an engine that captures a step itself needs to call it, after it has added requests.

        Raises:
            RuntimeError: the current stream is being captured.
        """
        self._planner.flush()

    def mode_for(self, params: SamplingParams | Sequence[SamplingParams]) -> Mode:
        """The mode that would serve a batch of such requests; none is added, and no seed is drawn.

        Args:
            params: of one request or of several; of none, the cheapest mode.

        Raises:
            TypeError: something else than ``SamplingParams``.
        """
        return self._planner.mode_for(params)

    def plan(self, slots: Sequence[int], mode: str | None = None, num_drafts: Sequence[int] | None = None) -> Plan:
        """The plan of a batch, made on the host; the same plan is returned until a request is added or removed.

        Args:
            slots: the slot of each row, with ``num_drafts`` of each request; -1 is padding, slots may repeat. Those of
                an earlier plan, ``plan.slots``, are not looked at again.
            mode: name of the mode to use; None for the cheapest that covers the batch.
            num_drafts: for ``verify``: k_n >= 0 drafts of each request, which then has k_n + 1 rows of logits.

        Raises:
            RuntimeError: the plan is new and the current stream is being captured.
            TypeError: a slot or a number of drafts that is no int.
            ValueError: a slot without a request; a mode that is unknown or does not cover a row; a wrong count.
        """
        return self._planner.plan(slots, mode, num_drafts)
