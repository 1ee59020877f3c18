"""The slots of a sampler by vLLM's request ids, kept in step with its batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_sampler.edits.names import reading
from compiled_sampler.engine.sampler import Sampler
from compiled_sampler.integrations.vllm.requests import ending_token, sampler_params

_LOG = logging.getLogger(__name__)


class _Held(NamedTuple):
    """A request of the batch."""

    slot: int
    """-1 where it is refused."""
    state: Any
    """vLLM's record of the request."""
    prompt_len: int
    """Its prompt; a streaming session makes it longer."""


class RequestSlots:
    """Holds the requests of a batch, and no others: one that comes back is added with all its tokens."""

    def __init__(self, sampler: Sampler, salt: int) -> None:
        self._sampler, self._salt = sampler, salt
        self._held: dict[str, _Held] = {}
        self._ending = [0] * sampler.max_num_requests
        # The token that ends the request of each slot.
        self.endings: Tensor = torch.zeros(sampler.max_num_requests, dtype=torch.int64, device=sampler.device)

    def of_batch(self, states: Sequence[Any], refused: Mapping[str, str] | None = None) -> list[int]:
        """The slot of each request of a batch, -1 for one that cannot be drawn; slots of others are freed first."""
        here = {each.req_id: each for each in states}
        for request_id, held in list(self._held.items()):
            if not _is_same(held, here.get(request_id)):
                del self._held[request_id]
                if held.slot >= 0:
                    self._sampler.remove_request(held.slot)
        for request_id, state in here.items():
            if request_id not in self._held:
                reason = (refused or {}).get(request_id) or _unknown_text(state)
                if reason:
                    _LOG.error("request %s ends without a token of its own: %s", request_id, reason)
                # An error here would end the engine for every request; the row of slot -1 draws no token, and vLLM gets
                # the one that ends this request alone.
                slot = -1 if reason else self._added(state)
                self._held[request_id] = _Held(slot, state, state.num_prompt_tokens)
        return [self._held[each.req_id].slot for each in states]

    def forget(self) -> None:
        """Free every slot, behind a batch whose tokens somebody else drew."""
        self.of_batch([])

    def _added(self, state: Any) -> int:
        vocab_size = self._sampler.vocab_size
        params = sampler_params(state.sampling_params, state.req_id, self._salt).for_vocab(vocab_size)
        prompt = state.prompt_token_ids
        if prompt is None:  # embeddings: min_tokens counts them, and no other edit that is admitted reads them
            prompt = [vocab_size] * state.num_prompt_tokens
        text = (prompt, state.output_token_ids) if reading(params.edits) else (prompt, ()) if params.edits else ()
        slot = self._sampler.add_request(params, *text)
        ending = ending_token(state.sampling_params)
        if self._ending[slot] != ending:
            self._ending[slot] = ending
            self.endings[slot] = ending
        return slot


def _is_same(held: _Held, state: Any) -> bool:
    """Whether a batch still has a request; an id may come again for another one."""
    return state is held.state and state.num_prompt_tokens == held.prompt_len


def _unknown_text(state: Any) -> str | None:
    """Why the host cannot tell the text of a request to the edits that read it; None where it can, or none does."""
    if -1 in state.output_token_ids and reading(sampler_params(state.sampling_params, "", 0).edits):
        return "its tokens are on the device alone; async_scheduling must be False for it to go on here"
    return None
