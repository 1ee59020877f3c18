"""Who guesses the next tokens? Three drafters: a bigram model's likeliest tokens, its draws, and n-gram look-up.

A drafter is a function of the requests that run; whatever it guesses, the sampler's verification decides.

Dims: ``N`` requests of a batch, ``K`` drafts of a request at most, ``V`` vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler import Draft, Plan, Sampler
from tools.toy_engine.ngram_model import NgramModel

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


Drafter = Callable[[Batch], Drafts]


def likeliest(batch: Batch, model: NgramModel, width: int) -> Drafts:
    """K drafts a request, each the bigram model's first choice after the one before.

    Args:
        batch: the requests.
        model: on the device of the batch.
        width: K.
    """
    token_ids = [batch.context[:, 1]]
    for _ in range(width):
        token_ids.append(model.bigram_logits(token_ids[-1]).argmax(dim=1))
    return Drafts(torch.stack(token_ids[1:], dim=1), (width,) * len(batch.histories))


def drawn(batch: Batch, model: NgramModel, width: int, sampler: Sampler, coupled: bool) -> Drafts:
    """K drafts a request, each drawn from the bigram model with the request's own parameters.

    Args:
        batch: the requests.
        model: on the device of the batch.
        width: K.
        sampler: that holds the requests.
        coupled: draw with the target's noise (for ``match``), else with noise of their own (for the other rules).
    """
    handles: list[Draft] = []
    last = batch.context[:, 1]
    for offset in range(width):
        handles.append(sampler.draft(batch.plan, model.bigram_logits(last), batch.positions + offset, coupled, offset))
        last = handles[-1].token_ids
    token_ids = torch.stack([draft.token_ids for draft in handles], dim=1)
    return Drafts(token_ids, (width,) * len(batch.histories), handles)


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
