"""The slots of a sampler by vLLM's request ids, kept in step with its batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_sampler.engine.sampler import Sampler
from compiled_sampler.integrations.vllm.requests import ending_token, sampler_params
from compiled_sampler.params import SamplingParams

_KNOWN_BY_HOST = "async_scheduling must be False for it to go on here"


class _Held(NamedTuple):
    """A request that has a slot."""

    slot: int
    state: Any
    """vLLM's record of the request."""
    prompt_len: int
    """Its prompt; a streaming session makes it longer."""


class RequestSlots:
    """Holds the requests of a batch, and no others: one that comes back is added with all its tokens.

    Args:
        sampler: has the slots.
        salt: of seeds of requests without one.

    Attributes:
        endings: int64 ``[S]`` on the device, the token that ends the request of a slot.
    """

    def __init__(self, sampler: Sampler, salt: int) -> None:
        """Hold nothing."""
        self._sampler, self._salt = sampler, salt
        self._held: dict[str, _Held] = {}
        self._ending = [0] * sampler.max_num_requests
        self.endings: Tensor = torch.zeros(sampler.max_num_requests, dtype=torch.int64, device=sampler.device)

    def of_batch(self, states: Sequence[Any]) -> list[int]:
        """The slot of each request of a batch; slots of others are freed first.

        Args:
            states: vLLM's records of the requests, in the order of the batch.

        Raises:
            RuntimeError: a request must be added whose tokens the host does not know.
            ValueError: a parameter out of range.
        """
        here = {each.req_id: each for each in states}
        for request_id, held in list(self._held.items()):
            if not _is_same(held, here.get(request_id)):
                del self._held[request_id]
                self._sampler.remove_request(held.slot)
        for request_id, state in here.items():
            if request_id not in self._held:
                self._held[request_id] = _Held(self._added(state), state, state.num_prompt_tokens)
        return [self._held[each.req_id].slot for each in states]

    def forget(self) -> None:
        """Free every slot, behind a batch whose tokens somebody else drew."""
        self.of_batch([])

    def _added(self, state: Any) -> int:
        params = sampler_params(state.sampling_params, state.req_id, self._salt)
        slot = self._sampler.add_request(params, *_tokens(state, params))
        ending = ending_token(state.sampling_params)
        if self._ending[slot] != ending:
            self._ending[slot] = ending
            self.endings[slot] = ending
        return slot


def _is_same(held: _Held, state: Any) -> bool:
    """Whether a batch still has a request; an id may come again for another one."""
    return state is held.state and state.num_prompt_tokens == held.prompt_len


def _tokens(state: Any, params: SamplingParams) -> tuple[list[int], list[int]]:
    """The prompt of a request and what was drawn, where its edits read them.

    Raises:
        RuntimeError: the prompt is of embeddings, or the tokens are on the device alone.
    """
    if not params.edits:
        return [], []
    if state.prompt_token_ids is None:
        raise RuntimeError(f"request {state.req_id} must have a prompt of tokens for {params.edits}, got embeddings")
    if -1 in state.output_token_ids:
        raise RuntimeError(f"request {state.req_id} has tokens on the device alone; {_KNOWN_BY_HOST}")
    return state.prompt_token_ids, state.output_token_ids
