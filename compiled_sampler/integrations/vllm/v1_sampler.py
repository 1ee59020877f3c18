"""The draw of vLLM's V1 model runner, whose batch is of requests by id, in an order that changes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput

from compiled_sampler.edits.names import reading
from compiled_sampler.engine.plan import Plan
from compiled_sampler.integrations.vllm import parameters
from compiled_sampler.integrations.vllm.engine_sampler import EngineSampler, GaplessLogprobs
from compiled_sampler.integrations.vllm.parameters import Settings
from compiled_sampler.integrations.vllm.versions import unsupported_engine
from compiled_sampler.params import SamplingParams
from graph_cache import PinnedRing

_LOG = logging.getLogger(__name__)


class CheckedRequest(NamedTuple):
    """A request as the sampler takes it, or why it does not."""

    params: Any
    """Of vLLM."""
    own: SamplingParams | None
    reason: str | None


class HeldRequest(NamedTuple):
    """A request of the batch."""

    slot: int
    """-1 where it is refused."""
    state: Any
    """vLLM's record of the request."""
    prompt_len: int
    """Its prompt; a streaming session makes it longer."""


class HeldBatch(NamedTuple):
    """The rows of the last batch, and what tells whether the next one has the same."""

    request_ids: list[str]
    states: list[Any]
    prompt_lens: bytes
    slots: np.ndarray
    refused: dict[int, int]
    """The tokens that end refused requests, by row."""


class BatchRequests:
    """Holds the requests of a batch, and no others: one that comes back is added with all its tokens."""

    def __init__(self, engine: EngineSampler) -> None:
        self._engine = engine
        self._held: dict[str, HeldRequest] = {}
        self._last = HeldBatch([], [], b"", np.zeros(0, np.int64), {})

    def of_batch(self, states: Sequence[Any], checked: Mapping[str, CheckedRequest]) -> HeldBatch:
        """The rows of a batch, whose requests were checked; slots of others are freed."""
        here = {state.req_id: state for state in states}
        for request_id, held in list(self._held.items()):
            state = here.get(request_id)
            if state is not held.state or state.num_prompt_tokens != held.prompt_len:  # an id may come for another one
                del self._held[request_id]
                if held.slot >= 0:
                    self._engine.remove(held.slot)
        for request_id, state in here.items():
            if request_id not in self._held:
                own, reason = checked[request_id][1:]
                if own is not None:
                    reason = _unknown_text(state, own)
                if reason:
                    _LOG.error("request %s ends without a token of its own: %s", request_id, reason)
                # An error here would end the engine for every request; this row draws no token, and vLLM gets the one
                # that ends its request alone.
                slot = -1 if own is None or reason else self._added(own, state)
                self._held[request_id] = HeldRequest(slot, state, state.num_prompt_tokens)
        slots = np.array([self._held[state.req_id].slot for state in states], dtype=np.int64)
        ends = {row: parameters.ending_token(states[row].sampling_params) for row in np.flatnonzero(slots < 0).tolist()}
        prompt_lens = np.array([state.num_prompt_tokens for state in states], np.int32)
        self._last = HeldBatch([state.req_id for state in states], list(states), prompt_lens.tobytes(), slots, ends)
        return self._last

    def not_drawn(self, state: Any, checked: CheckedRequest) -> str | None:
        """Why a request of a batch would end without a token of its own; None for one that is drawn."""
        if checked.own is None or state.req_id in self._held:
            return checked.reason
        return _unknown_text(state, checked.own)

    def still(self, batch: Any, states: dict[str, Any]) -> HeldBatch | None:
        """The rows of vLLM's ``input_batch`` if they are those of the last batch."""
        last = self._last
        if batch.req_ids != last.request_ids or not all(map(is_, map(states.get, last.request_ids), last.states)):
            return None
        is_same = batch.num_prompt_tokens[: batch.num_reqs].tobytes() == last.prompt_lens
        return last if is_same else None

    def forget(self) -> None:
        """Free every slot, after a batch whose tokens somebody else drew."""
        self.of_batch([], {})

    def _added(self, own: SamplingParams, state: Any) -> int:
        text = state.prompt_token_ids, state.num_prompt_tokens, state.output_token_ids
        return self._engine.add(own, state.sampling_params, *text)


def _unknown_text(state: Any, own: SamplingParams) -> str | None:
    """Why the host cannot tell the text of a request to the edits that read it; None where it can, or none does."""
    if -1 in state.output_token_ids and reading(own.edits):
        return "its tokens are on the device alone; async_scheduling must be False for it to go on here"
    return None


class RunnerSampler:
    """Draws for one model runner, with logits such as some."""

    def __init__(self, runner: Any, logits: Tensor, settings: Settings) -> None:
        self._runner, self._rule, most = runner, settings.rule, runner.max_num_reqs
        given = runner.input_batch.vocab_size, most, logits, settings, torch.int32
        self.engine = EngineSampler(runner.vllm_config, *given)
        self.requests = BatchRequests(self.engine)
        self._ring = PinnedRing(2 * most, logits.device)

    def draw(self, logits: Tensor, drafts: Any, rows: HeldBatch) -> SamplerOutput:
        """The tokens of a batch from a row of logits a request, or with drafts the rows of request 0, then of 1, ..."""
        top = self._runner.input_batch.sampling_metadata.max_num_logprobs
        if drafts is None:
            batch = self.engine.planned(rows.slots, None, rows.refused)
            if batch.reads_positions:
                self._write_positions(batch.positions)
            drawn = self.engine.sample(batch, logits, top)
        else:
            counts = np.array(drafts.num_draft_tokens, np.int64)
            batch = self.engine.planned(self._with_drafts(rows.slots), counts, rows.refused)
            self._write_positions(batch.positions, drafts, batch.plan)
            # by "match" where nobody knows the law of the drafts, as it is right for all of them
            probs = self._runner._get_spec_decode_draft_probs(drafts) if self._rule != "match" else None
            rule = "match" if probs is None else self._rule
            drawn = self.engine.verify(batch, logits, drafts.draft_token_ids, top, rule, probs)
        logprobs = None if drawn.logprobs is None else GaplessLogprobs(*drawn.logprobs)
        return SamplerOutput(sampled_token_ids=drawn.token_ids, logprobs_tensors=logprobs)

    # Here alone positions of vLLM become those of the sampler.
    def _write_positions(self, positions: Tensor, drafts: Any = None, plan: Plan | None = None) -> None:
        """Write the position of the first token that each request may draw, int64 ``[N]``: the tokens before it."""
        if drafts is None or plan is None or not self._runner.use_async_scheduling:
            # The host counts them, whole prompts before all their chunks are read, so a row in the midst of its prompt
            # records nothing there. They go to the device without a wait.
            known = np.asarray(self._runner.input_batch.num_tokens_no_spec[: len(positions)], dtype=np.int64)
            self._ring.send(known.tobytes(), positions.view(torch.int32))
            return
        # How many drafts of the step before were accepted is known on the device alone: after the last draft, less all.
        last = drafts.logits_indices[drafts.bonus_logits_indices]
        torch.sub(self._runner.positions[last] + 1, plan.counts, out=positions)

    def _with_drafts(self, slots: np.ndarray) -> np.ndarray:
        """The slots of a batch with drafts, -1 in the midst of a prompt, which positions of the device do not leave."""
        if not self._runner.use_async_scheduling:
            return slots
        is_unread = self._runner.discard_request_mask.np[: len(slots)]
        return np.where(is_unread, -1, slots) if is_unread.any() else slots


class RunnerState:
    """Decides who draws the batches of one model runner, and counts them."""

    def __init__(self, runner: Any, settings: Settings) -> None:
        self._runner, self._settings = runner, settings
        self._sampler: RunnerSampler | None = None
        self._checked: dict[str, CheckedRequest] = {}  # of the last batch, by id
        self._of_engine = unsupported_engine(runner)
        self.counts = Counter(batches=0, stock_batches=0)  # and "stock: reason"
        if self._of_engine is not None and settings.on_unsupported == "error":
            raise RuntimeError(f"{self._of_engine}; or install(on_unsupported='stock') to draw by vLLM's own sampler")

    def draw(self, logits: Tensor, drafts: Any) -> SamplerOutput | None:
        """The tokens of a batch; None where vLLM's own sampler shall draw them."""
        if self._of_engine is not None:
            self.counts.update(["stock_batches", f"stock: {self._of_engine}"])
            return None
        sampler, batch = self._sampler_of(logits), self._runner.input_batch
        rows = sampler.requests.still(batch, self._runner.requests)
        if rows is None:
            states = [self._runner.requests[request_id] for request_id in batch.req_ids]
            self._checked = {state.req_id: self._check(state, sampler.engine) for state in states}
            if self._settings.on_unsupported == "stock":
                reasons = (sampler.requests.not_drawn(state, self._checked[state.req_id]) for state in states)
                reason = next(filter(None, reasons), None)
                if reason is not None:
                    sampler.requests.forget()
                    self.counts.update(["stock_batches", f"stock: {reason}"])
                    return None
            rows = sampler.requests.of_batch(states, self._checked)
        if self._settings.on_unsupported == "error":
            # vLLM's generators draw nothing then, and its bookkeeping of a prompt's chunks fails with those of the CPU.
            batch.generators.clear()
        # What was not refused when it came, though it asks for what the sampler does not have, ends here, alone.
        self.counts.update(["batches"])
        return sampler.draw(logits, drafts, rows)

    def warm_up(self, hidden_states: Tensor) -> None:
        """Prepare the sampler before the first batch, once, where it will draw and the settings say so."""
        if self._of_engine is None and self._sampler is None and self._settings.warmup == "start":
            # Whatever the states hold, their logits have the format of all batches.
            self._sampler_of(self._runner.model.compute_logits(hidden_states[:1])).engine.warm_up()

    def _sampler_of(self, logits: Tensor) -> RunnerSampler:
        """The sampler, made for logits such as these."""
        if self._sampler is None:
            self._sampler = RunnerSampler(self._runner, logits, self._settings)
        return self._sampler

    def _check(self, state: Any, engine: EngineSampler) -> CheckedRequest:
        known = self._checked.get(state.req_id)
        if known is not None and known.params is state.sampling_params:
            return known
        has_tokens = state.prompt_token_ids is not None
        own_and_reason = engine.checked(state.sampling_params, state.req_id, has_tokens=has_tokens)
        return CheckedRequest(state.sampling_params, *own_and_reason)
