"""L tokens behind one prompt, drawn many times: plainly, with drafts under each rule, and in two ways that are wrong.

Dims: ``N`` draws of a batch, ``L`` tokens, ``K = L - 1`` drafts, ``V`` vocabulary, ``C`` contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from compiled_sampler import Draft, Plan, Sampler, SamplingParams
from tools.convergence.contexts import Contexts


class Drawer:
    """Draws L tokens at a time; the draw of number i uses the noise of positions L * i to L * i + K.

    Args:
        contexts: of the prompt.
        length: L.
        params: of the request, with a seed.
        backend: of the sampler.
    """

    def __init__(self, contexts: Contexts, length: int, params: SamplingParams, backend: str) -> None:
        """One request; every draw is a row of it."""
        self._contexts, self._length = contexts, length
        self._sampler = Sampler(contexts.vocab_size, 1, backend=backend)
        self._slot = self._sampler.add_request(params)

    def plain(self, numbers: Tensor) -> Tensor:
        """The cells of draws without drafts, int64 ``[N]``: where ``contexts.law`` has the probability of the tokens.

        Args:
            numbers: int64 ``[N]``, of the draws.
        """
        return self._completed(numbers, torch.full((len(numbers), self._length), -1))

    def verified(self, numbers: Tensor, rule: str) -> Tensor:
        """The cells of tokens that a rule emits, int64 ``[N]``; the others of the L are drawn plainly."""
        return self._completed(numbers, self._emitted(numbers, rule)[0])

    def drafts_accepted(self, numbers: Tensor) -> Tensor:
        """A wrong way: every draft is accepted, and one token more drawn from the target, int64 ``[N]``."""
        drafts, _ = self._drafts(numbers, coupled=False)
        return self._completed(numbers, torch.nn.functional.pad(drafts, (0, 1), value=-1))

    def without_residual(self, numbers: Tensor) -> Tensor:
        """A wrong way: a rejected draft is replaced by a draw from the target, not from the residual, int64 ``[N]``."""
        token_ids, accepted = self._emitted(numbers, "rejection")
        return self._completed(numbers, torch.where(torch.arange(self._length) < accepted[:, None], token_ids, -1))

    def _emitted(self, numbers: Tensor, rule: str) -> tuple[Tensor, Tensor]:
        """Tokens of one verification, int64 ``[N, L]``, -1 behind the last; and accepted drafts, int64 ``[N]``."""
        drafts, handles = self._drafts(numbers, coupled=rule == "match")
        passed = torch.zeros(len(numbers), self._length, dtype=torch.int64)
        for place in range(self._length - 1):
            passed[:, place + 1] = self._contexts.following[passed[:, place], drafts[:, place]]
        plan = self._plan(len(numbers), [self._length - 1] * len(numbers))
        logits = self._contexts.target[passed.flatten()]
        outputs = self._sampler.verify(plan, logits, handles, numbers * self._length, rule)
        return outputs.token_ids, outputs.num_accepted

    def _drafts(self, numbers: Tensor, coupled: bool) -> tuple[Tensor, list[Draft]]:
        """Drafts of the smaller model, int64 ``[N, K]``, and their handles."""
        plan, contexts = self._plan(len(numbers)), torch.zeros_like(numbers)
        handles: list[Draft] = []
        for offset in range(self._length - 1):
            logits, positions = self._contexts.draft[contexts], numbers * self._length + offset
            handles.append(self._sampler.draft(plan, logits, positions, coupled, offset))
            contexts = self._contexts.following[contexts, handles[-1].token_ids]
        return torch.stack([each.token_ids for each in handles], 1), handles

    def _completed(self, numbers: Tensor, token_ids: Tensor) -> Tensor:
        """The cells of tokens, int64 ``[N]``; where one is -1 it is drawn from the target."""
        contexts, cells = torch.zeros_like(numbers), torch.zeros_like(numbers)
        for place in range(self._length):
            tokens = token_ids[:, place].clone()
            missing = (tokens < 0).nonzero()[:, 0]
            if len(missing):
                logits, positions = self._contexts.target[contexts[missing]], numbers[missing] * self._length + place
                tokens[missing] = self._sampler.sample(self._plan(len(missing)), logits, positions).token_ids
            cells = contexts * self._contexts.vocab_size + tokens
            contexts = self._contexts.following[contexts, tokens]
        return cells

    def _plan(self, count: int, num_drafts: Sequence[int] | None = None) -> Plan:
        return self._sampler.plan([self._slot] * count, num_drafts=num_drafts)


def ways(drawer: Drawer) -> dict[str, Callable[[Tensor], Tensor]]:
    """The ways of drawing that have the law of the target, by name."""
    of_rules = {name: partial(drawer.verified, rule=rule) for name, rule in _RULES.items()}
    return {"no drafts": drawer.plain, **of_rules}


def wrong_ways(drawer: Drawer) -> dict[str, Callable[[Tensor], Tensor]]:
    """Ways that have another law, by name: a distance that cannot tell them from the others proves nothing."""
    return {
        "control: rejection without residual": drawer.without_residual,
        "control: every draft accepted": drawer.drafts_accepted,
    }


_RULES = {"match, coupled drafts": "match", "rejection": "rejection", "block": "block"}
