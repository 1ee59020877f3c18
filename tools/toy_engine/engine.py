"""The host half of the engine: requests wait, run in slots and leave, and every step has another batch.

An engine owns the loop and knows nothing of logits: ``sampler.plan`` chooses a mode for the slots that run, a
``DecodeStep`` draws one token for each, and finished requests give their slot to the next in the queue.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from compiled_sampler import SamplingParams
from tools.model.tokenizer import END_ID
from tools.toy_engine.decode_step import DecodeStep

_MOST_ADMITTED = 2  # requests a step, as an engine limits the prompts that it reads between two steps


@dataclass(frozen=True)
class Request:
    """What somebody asks for."""

    request_id: int
    prompt: tuple[int, ...]
    """Token ids, one at least."""
    params: SamplingParams
    """With a seed, so that the request can be repeated."""
    max_tokens: int
    """At least 1; an end of document stops earlier."""


def longest(requests: Sequence[Request]) -> int:
    """Positions of the longest text that requests may come to, with its prompt."""
    return max(len(request.prompt) + request.max_tokens for request in requests)


@dataclass
class Decoded:
    """What came of a list of requests."""

    streams: dict[int, list[int]] = field(default_factory=dict)
    """The tokens drawn, by request id."""
    mode_steps: Counter[str] = field(default_factory=Counter)
    """How many steps each mode served."""
    batches: list[tuple[int, ...]] = field(default_factory=list)
    """The request ids of each step's rows."""
    slots: list[int] = field(default_factory=list)
    """The slots in the order they were handed out."""
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of all streams."""
        return sum(map(len, self.streams.values()))

    def sha256(self) -> str:
        """A digest of all streams, in the order of the request ids."""
        return hashlib.sha256(json.dumps(sorted(self.streams.items())).encode()).hexdigest()

    def compare(self, reference: Decoded) -> tuple[int, int]:
        """How many tokens were compared and how many differ; a token that only one of the two has differs."""
        pairs = [
            pair
            for request_id in self.streams.keys() | reference.streams.keys()
            for pair in zip_longest(self.streams.get(request_id, ()), reference.streams.get(request_id, ()))
        ]
        return len(pairs), sum(ours != theirs for ours, theirs in pairs)


class Engine:
    """Decodes requests with continuous batching.

    Args:
        step: the device half, with the sampler whose slots the requests run in.
    """

    def __init__(self, step: DecodeStep) -> None:
        """Nothing runs."""
        self._step, self._sampler = step, step.sampler
        self._running: dict[int, Request] = {}

    def run(
        self, requests: Sequence[Request], max_running: int, progress: Callable[[int], object] | None = None
    ) -> Decoded:
        """Decode until every request has left.

        Args:
            requests: in the order of their arrival.
            max_running: rows of the largest batch, 1 up to the sampler's ``max_num_requests``.
            progress: called with the number of tokens drawn after each step.
        """
        waiting, decoded = deque(requests), Decoded()
        start = time.perf_counter()
        while waiting or self._running:
            for _ in range(min(len(waiting), max_running - len(self._running), _MOST_ADMITTED)):
                self._admit(waiting.popleft(), decoded)
            self._decode_one(decoded)
            if progress is not None:
                progress(decoded.num_tokens)
        decoded.seconds = time.perf_counter() - start
        return decoded

    def _admit(self, request: Request, decoded: Decoded) -> None:
        """Give a request a slot, for the sampler's parameters and the model's context alike."""
        slot = self._sampler.add_request(request.params)
        self._step.admit(slot, request.prompt)
        self._running[slot] = request
        decoded.slots.append(slot)
        decoded.streams[request.request_id] = []

    def _decode_one(self, decoded: Decoded) -> None:
        """Draw one token for each running request; the only wait for the device is the reading of the tokens."""
        plan = self._sampler.plan(self._step.padded(list(self._running)))
        decoded.mode_steps[plan.mode.name] += 1
        decoded.batches.append(tuple(request.request_id for request in self._running.values()))
        token_ids = self._step(plan).tolist()
        for (slot, request), token_id in zip(list(self._running.items()), token_ids, strict=False):
            stream = decoded.streams[request.request_id]
            stream.append(token_id)
            if token_id == END_ID or len(stream) == request.max_tokens:
                self._sampler.remove_request(slot)
                del self._running[slot]
