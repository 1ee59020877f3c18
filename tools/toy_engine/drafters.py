"""Who guesses the next tokens? A smaller model's likeliest tokens, its draws, trees of these, and prompt look-up.

A drafter is a function of the requests that run; whatever it guesses, the sampler's verification decides.

Dims: ``N`` requests of a batch, ``K`` drafts of a request at most, ``V`` vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler import Draft, Plan, Sampler
from tools.toy_engine.cached_model import CachedModel

_LOOKED_UP = 2  # tokens that an earlier place must share with the end of the history


class Batch(NamedTuple):
    """The requests that run, as a drafter sees them."""

    plan: Plan
    """One row a request, no drafts."""
    histories: Sequence[Sequence[int]]
    """Of each request the prompt and the tokens since."""
    context: Tensor
    """int64 ``[N, 2]``, the last two tokens; -1 before the beginning."""
    positions: Tensor
    """int64 ``[N]``, of the next token."""


class Drafts(NamedTuple):
    """Guesses for the next tokens of each request."""

    token_ids: Tensor
    """int64 ``[N, K]``, padded with -1."""
    counts: tuple[int, ...]
    """Drafts of each request, 0 to K."""
    handles: Sequence[Draft] | None = None
    """K of them, where the sampler drew the drafts: what a rule needs that asks for their law."""
    siblings: int = 1
    """Of a tree, the drafts at each place; the first of them goes on, and ``token_ids`` has place after place."""

    @property
    def parents(self) -> list[list[int]] | None:
        """Of a tree, the draft before each one, -1 before the first place; None for chains."""
        if self.siblings == 1:
            return None
        firsts = range(-self.siblings, self.token_ids.shape[1] - self.siblings, self.siblings)
        return [[max(first, -1) for first in firsts for _ in range(self.siblings)]] * len(self.counts)


Drafter = Callable[[Batch], Drafts]


def likeliest(batch: Batch, model: CachedModel, width: int) -> Drafts:
    """K drafts a request, each the smaller model's first choice after the one before.

    Args:
        batch: the requests.
        model: on the device of the batch; its slots are those of the requests.
        width: K.
    """
    token_ids: list[Tensor] = []
    for _ in range(width):
        token_ids.append(draft_logits(batch, model, token_ids).argmax(dim=1))
    return Drafts(torch.stack(token_ids, dim=1), (width,) * len(batch.histories))


def drawn(batch: Batch, model: CachedModel, width: int, sampler: Sampler, coupled: bool) -> Drafts:
    """K drafts a request, each drawn from the smaller model with the request's own parameters.

    Args:
        batch: the requests.
        model: on the device of the batch; its slots are those of the requests.
        width: K.
        sampler: that holds the requests.
        coupled: draw with the target's noise (for ``match``), else with noise of their own (for the other rules).
    """
    handles: list[Draft] = []
    for offset in range(width):
        logits = draft_logits(batch, model, [draft.token_ids for draft in handles])
        handles.append(sampler.draft(batch.plan, logits, batch.positions + offset, coupled, offset))
    token_ids = torch.stack([draft.token_ids for draft in handles], dim=1)
    return Drafts(token_ids, (width,) * len(batch.histories), handles)


def drawn_trees(batch: Batch, model: CachedModel, width: int, sampler: Sampler, siblings: int) -> Drafts:
    """K places of several drafts a request: the best of the smaller model's race on the target's noise.

    Args:
        batch: the requests.
        model: on the device of the batch; its slots are those of the requests.
        width: K.
        sampler: that holds the requests.
        siblings: drafts at each place, of which the first goes on.
    """
    places: list[Tensor] = []
    for offset in range(width):
        logits = draft_logits(batch, model, [drafts[:, 0] for drafts in places])
        places.append(sampler.draft(batch.plan, logits, batch.positions + offset, width=siblings).token_ids)
    return Drafts(torch.cat(places, 1), (width * siblings,) * len(batch.histories), siblings=siblings)


def draft_logits(batch: Batch, model: CachedModel, drafts: Sequence[Tensor]) -> Tensor:
    """What a smaller model makes of the texts and the drafts so far, float32 ``[N, V]``.

    Before the first draft it reads the last two tokens: where every draft of the step before was accepted, it has not
    read the last of them.

    Args:
        batch: the requests.
        model: has read the texts up to the last two tokens, and the drafts but for the last.
        drafts: int64 ``[N]`` each.
    """
    slots = batch.plan.slot_ids
    if drafts:
        return model.logits(slots, batch.positions - 1 + len(drafts), drafts[-1])
    places = torch.stack([batch.positions - 2, batch.positions - 1], dim=1)
    both = model.logits(slots.repeat_interleave(2), places.flatten(), batch.context.flatten())
    return both.view(len(slots), 2, -1)[:, 1].contiguous()  # one layout for all drafts: compiled once


def looked_up(batch: Batch, width: int) -> Drafts:
    """As many drafts a request as its own history offers, up to K: see :func:`look_up`.

    Args:
        batch: the requests.
        width: K.
    """
    found = [look_up(history, width) for history in batch.histories]
    padded = [[*drafts, *[-1] * (width - len(drafts))] for drafts in found]
    return Drafts(torch.tensor(padded, device=batch.positions.device), tuple(map(len, found)))


def look_up(history: Sequence[int], most: int) -> list[int]:
    """What followed the latest earlier place that reads like the end of the history (Saxena, prompt lookup, 2023).

    Args:
        history: token ids.
        most: return no more than this.

    Returns:
        0 to ``most`` token ids: none where the last two tokens are new, few where the place is close to the end.
    """
    end = list(history[-_LOOKED_UP:])
    for follower in range(len(history) - 1, _LOOKED_UP - 1, -1):
        if list(history[follower - _LOOKED_UP : follower]) == end:
            return list(history[follower : follower + most])
    return []
