"""How many tokens does a step give when drafts are verified, and are they the same tokens?

The loop of an engine that decodes with drafts: a drafter guesses, the target model computes the logits after each
guess in one pass, ``Sampler.verify`` accepts as many as its rule does and draws one token more.

Dims: ``N`` requests of a batch, ``K`` drafts of a request at most, ``R`` rows of logits: one a draft and one a request.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_sampler import Sampler, VerifyOutputs
from tools.model.tokenizer import END_ID
from tools.model.transformer import Model
from tools.toy_engine.cached_model import CachedModel
from tools.toy_engine.drafters import Batch, Drafter, Drafts, drawn, drawn_trees, likeliest, looked_up
from tools.toy_engine.engine import Decoded, Request, longest

WIDTH = 3
"""K, the most places of drafts of a request in a step."""
SIBLINGS = 2
"""Drafts at each place of a tree."""
NUM_REQUESTS, MOST_RUNNING = 8, 3
"""Of the requests that a run decodes, and of its largest batch: small batches take different modes."""


class Pairing(NamedTuple):
    """A drafter and the rule that judges it."""

    drafter: str
    rule: str
    draft: Drafter


@dataclass
class Speculated:
    """What came of decoding with drafts."""

    decoded: Decoded = field(default_factory=Decoded)
    """The streams, and the seconds."""
    drafted: list[int] = field(default_factory=lambda: [0] * WIDTH)
    """How often a draft stood at each place of its block."""
    accepted: list[int] = field(default_factory=lambda: [0] * WIDTH)
    """How often it was accepted there."""
    num_drafts: int = 0
    """Of all steps, those of trees that stand at one place too."""
    verifications: int = 0
    """Steps, each counted once for every request that ran."""

    @property
    def tokens_per_step(self) -> float:
        """Mean number of accepted drafts, and one; of its last step a stream may have needed fewer."""
        return 1.0 + sum(self.accepted) / max(self.verifications, 1)

    def count(self, drafts: Drafts, num_accepted: Sequence[int]) -> None:
        """Take in one step: ``num_accepted [N]`` of the first N requests."""
        counts = drafts.counts[: len(num_accepted)]
        self.verifications, self.num_drafts = self.verifications + len(counts), self.num_drafts + sum(counts)
        places = [count // drafts.siblings for count in counts]
        for tally, numbers in ((self.drafted, places), (self.accepted, num_accepted)):
            for place in range(WIDTH):
                tally[place] += sum(number > place for number in numbers)

    def numbers(self, pairing: Pairing, reference: Decoded) -> dict[str, Any]:
        """What a file stores; ``match`` alone promises the reference's tokens, the other rules promise their law."""
        streams = {request_id: reference.streams[request_id] for request_id in self.decoded.streams}
        compared = self.decoded.compare(Decoded(streams)) if pairing.rule == "match" else (None, None)
        shares = zip(self.accepted, self.drafted, strict=True)
        return {
            "drafter": pairing.drafter,
            "rule": pairing.rule,
            "requests": len(streams),
            "tokens": self.decoded.num_tokens,
            "verifications": self.verifications,
            "drafts_per_step": round(self.num_drafts / max(self.verifications, 1), 3),
            "accepted_share": [round(accepted / drafted, 4) if drafted else None for accepted, drafted in shares],
            "tokens_per_step": round(self.tokens_per_step, 3),
            "compared": compared[0],
            "mismatches": compared[1],
            "seconds": round(self.decoded.seconds, 2),
        }


class Models(NamedTuple):
    """The target, and the smaller model that guesses for it; both in float64 on the sampler's device."""

    target: Model
    draft: Model


class SpeculativeEngine:
    """Decodes requests with drafts and continuous batching.

    Args:
        models: of the sampler's vocabulary.
        sampler: without requests.
        length: most positions of a text; the drafts of a last step may need K more.
        uniform: every batch takes the mode that covers all and has two requests at least, so that compiling a rule
            once is enough; a single row would be compiled apart.

    Attributes:
        drafter: the smaller model, with the texts of the requests that run.
    """

    def __init__(self, models: Models, sampler: Sampler, length: int, uniform: bool = False) -> None:
        """Nothing runs."""
        self._sampler, num_slots = sampler, sampler.max_num_requests
        self._target, self.drafter = (CachedModel(each, num_slots, length + WIDTH) for each in models)
        self._mode = "full" if uniform else None
        self._fewest = 2 if uniform else 1
        self._running: dict[int, tuple[Request, list[int]]] = {}

    def run(self, draft: Drafter, rule: str, requests: Sequence[Request], max_running: int) -> Speculated:
        """Decode until every request has left.

        Args:
            draft: guesses.
            rule: judges, see ``Sampler.verify``.
            requests: in the order of their arrival.
            max_running: requests of the largest batch, 1 up to the sampler's ``max_num_requests``.
        """
        waiting, result = deque(requests), Speculated()
        start = time.perf_counter()
        while waiting or self._running:
            while waiting and len(self._running) < max_running:
                request = waiting.popleft()
                self._running[self.admit(request)] = request, list(request.prompt)
            self._step(draft, rule, result)
        result.decoded.seconds = time.perf_counter() - start
        return result

    def verify(self, batch: Batch, drafts: Drafts, rule: str) -> VerifyOutputs:
        """Compute the target's logits after every draft of a batch and judge the drafts."""
        plan = self._sampler.plan(batch.plan.slots, self._mode, num_drafts=drafts.counts)
        if drafts.siblings > 1:
            logits = self._logits_of_trees(batch, drafts)
            outputs = self._sampler.verify(
                plan, logits, drafts.token_ids, batch.positions, rule, parents=drafts.parents
            )
            self._read_again(batch, outputs)
            return outputs
        logits = self._target.logits(*rows_of(batch, drafts, self._target.vocab_size))
        guesses = drafts.token_ids if drafts.handles is None else drafts.handles
        return self._sampler.verify(plan, logits, guesses, batch.positions, rule)

    def _logits_of_trees(self, batch: Batch, drafts: Drafts) -> Tensor:
        """The target's logits after the text and after every draft, float32 ``[N * (1 + M), V]``."""
        # The cache has one text a slot: first that of the drafts that go on, then from its end each of the others,
        # which nothing that is read later looks at.
        count, places = len(drafts.counts), drafts.token_ids.unflatten(1, (-1, drafts.siblings))
        width, slots = places.shape[1], batch.plan.slot_ids
        chain = Drafts(places[:, :, 0], (width,) * count)
        rows = self._target.logits(*rows_of(batch, chain, self._target.vocab_size)).unflatten(0, (count, width + 1))
        after = rows[:, 1:, None].repeat(1, 1, drafts.siblings, 1)
        for place, sibling in itertools.product(reversed(range(width)), range(1, drafts.siblings)):
            after[:, place, sibling] = self._target.logits(slots, batch.positions + place, places[:, place, sibling])
        return torch.cat([rows[:, :1], after.flatten(1, 2)], 1).flatten(0, 1)

    def _read_again(self, batch: Batch, outputs: VerifyOutputs) -> None:
        """Put the accepted drafts into the target's cache, where others of a tree may stand."""
        tokens = outputs.token_ids[:, :WIDTH]
        places = torch.arange(WIDTH, device=tokens.device)
        positions = torch.where(places < outputs.num_accepted[:, None], batch.positions[:, None] + places, -1)
        self._target.logits(batch.plan.slot_ids.repeat_interleave(WIDTH), positions.flatten(), tokens.flatten())

    def admit(self, request: Request) -> int:
        """Give a request a slot, which is returned; both models read its prompt but for the last token."""
        slot = self._sampler.add_request(request.params)
        for model in (self._target, self.drafter):
            model.read(slot, request.prompt[:-1])
        return slot

    def _step(self, draft: Drafter, rule: str, result: Speculated) -> None:
        """Give every running request 1 to K + 1 tokens."""
        running = list(self._running.items())
        padding: list[tuple[int, list[int]]] = [(-1, [])] * (self._fewest - len(running))
        rows = [(slot, history) for slot, (_, history) in running] + padding
        batch = make_batch(self._sampler, rows, self._mode)
        drafts = draft(batch)
        outputs = self.verify(batch, drafts, rule)
        result.count(drafts, outputs.num_accepted[: len(running)].tolist())
        emitted = zip(outputs.token_ids.tolist(), outputs.num_emitted.tolist(), strict=True)
        for (slot, (request, history)), (token_ids, count) in zip(running, emitted, strict=False):
            history += token_ids[:count]
            stream = finished_stream(request, history)
            if stream is not None:
                result.decoded.streams[request.request_id] = stream
                self._sampler.remove_request(slot)
                del self._running[slot]


def make_batch(sampler: Sampler, rows: Sequence[tuple[int, list[int]]], mode: str | None = None) -> Batch:
    """What a drafter sees of requests.

    Args:
        sampler: that holds them.
        rows: of each request its slot, and the prompt with the tokens since; slot -1 is padding.
        mode: to force, see ``Sampler.plan``.
    """
    slots, histories = zip(*rows, strict=True)
    context = torch.tensor([[-1, -1, *history][-2:] for history in histories], device=sampler.device)
    positions = torch.tensor([len(history) for history in histories], device=sampler.device)
    return Batch(sampler.plan(slots, mode), histories, context, positions)


def rows_of(batch: Batch, drafts: Drafts, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that the target reads: slots, positions and token ids, int64 ``[R]``, request after request.

    Args:
        batch: the requests.
        drafts: of them; what follows one that is no token id is never emitted, so any logits will do.
        vocab_size: V.
    """
    tokens = torch.cat([batch.context[:, 1:], drafts.token_ids.clamp(max=vocab_size - 1)], dim=1)
    rows = [(n, place) for n, count in enumerate(drafts.counts) for place in range(count + 1)]
    requests, places = torch.tensor(rows, device=tokens.device).T
    return batch.plan.slot_ids[requests], batch.positions[requests] - 1 + places, tokens[requests, places]


def finished_stream(request: Request, history: Sequence[int]) -> list[int] | None:
    """The tokens of a request up to its limit or the end of its document; None while it goes on."""
    stream = list(history[len(request.prompt) :][: request.max_tokens])
    if END_ID in stream:
        return stream[: stream.index(END_ID) + 1]
    return stream if len(stream) == request.max_tokens else None


def pairings(model: CachedModel, sampler: Sampler) -> list[Pairing]:
    """Every drafter with the rules that suit it.

    Args:
        model: the smaller one, of the engine that will run.
        sampler: that will hold the requests.
    """
    coupled, independent = (partial(drawn, model=model, width=WIDTH, sampler=sampler, coupled=c) for c in (True, False))
    trees = partial(drawn_trees, model=model, width=WIDTH, sampler=sampler, siblings=SIBLINGS)
    return [
        Pairing("small model, argmax", "match", partial(likeliest, model=model, width=WIDTH)),
        Pairing("small model, coupled", "match", coupled),
        Pairing(f"small model, trees of {SIBLINGS} a place", "match", trees),
        Pairing("small model, independent", "rejection", independent),
        Pairing("small model, independent", "block", independent),
        Pairing("look-up", "match", partial(looked_up, width=WIDTH)),
    ]


def speculate(
    models: Models,
    sampler: Sampler,
    requests: Sequence[Request],
    reference: Decoded,
    progress: Callable[[int, int], object],
) -> list[dict[str, Any]]:
    """The numbers of every pairing, on ``NUM_REQUESTS`` of the requests.

    Args:
        models: on the sampler's device.
        sampler: of ``MOST_RUNNING`` requests or more.
        requests: some of them, of every kind, are decoded anew for each pairing.
        reference: their tokens without drafts.
        progress: called as ``progress(done, total)`` after each pairing.
    """
    chosen = requests[:: max(1, len(requests) // NUM_REQUESTS)][:NUM_REQUESTS]
    engine = SpeculativeEngine(models, sampler, longest(chosen), uniform=sampler.backend != "eager")
    pairs, numbers = pairings(engine.drafter, sampler), list[dict[str, Any]]()
    for pairing in pairs:
        result = engine.run(pairing.draft, pairing.rule, chosen, MOST_RUNNING)
        numbers.append(result.numbers(pairing, reference))
        progress(len(numbers), len(pairs))
    return numbers
