"""Every text that drafts and draws can lead to from one prompt, with what both models say behind it.

Dims: ``L`` tokens that are drawn, ``C`` contexts of fewer than L tokens, ``V`` columns: in each context the tokens that
target or drafter keep there, ascending. The others have no part in the law, and a million draws would read them each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tools.model.transformer import Model
from tools.toy_engine.cached_model import CachedModel
from tools.toy_engine.speculation import Models


class Contexts(NamedTuple):
    """The contexts in the order of their length, the bare prompt first; token ids are columns of their context."""

    target: Tensor
    """float32 ``[C, V]``, logits of the target; -inf in the columns that a context does not need."""
    draft: Tensor
    """float32 ``[C, V]``, logits of the smaller model, likewise."""
    following: Tensor
    """int64 ``[C, V]``, the context with one token more; -1 behind L - 1 tokens and for columns without a token."""

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.target.shape[1]


def contexts_of(models: Models, prompt: Sequence[int], length: int, top_k: int) -> Contexts:
    """The contexts of a prompt.

    Args:
        models: on the CPU.
        prompt: token ids, one or more.
        length: L.
        top_k: tokens that target and drafter keep in each context, so V is twice as large.
    """
    logits, following, level, known = list[Tensor](), list[Tensor](), [tuple(prompt)], 1
    for place in range(length):
        below: list[tuple[int, ...]] = []
        for text, both in zip(level, _logits(models, level).unbind(1), strict=True):
            kept = sorted(set(both.topk(top_k).indices.flatten().tolist()))
            children = torch.arange(len(kept)) + known + len(below) if place < length - 1 else torch.tensor([-1])
            logits.append(_padded(both[:, kept], 2 * top_k, -math.inf))
            following.append(_padded(children, 2 * top_k, -1))
            below += [(*text, token) for token in kept]
        level, known = below, known + len(below)
    target, draft = torch.stack(logits, 1)
    return Contexts(target, draft, torch.stack(following))


def _padded(values: Tensor, size: int, filler: float) -> Tensor:
    """Values ``[..., n]`` with fillers behind them, ``[..., size]``."""
    return torch.nn.functional.pad(values, (0, size - values.shape[-1]), value=filler)


def law(logits: Tensor, following: Tensor, length: int, top_k: int) -> Tensor:
    """The probability of each L tokens, float64 ``[C * V]``, by softmax over the ``top_k`` largest logits.

    Args:
        logits: float32 ``[C, V]``.
        following: of ``Contexts``.
        length: L.
        top_k: tokens that are kept.

    Returns:
        At ``context * V + token`` the probability of the tokens of a context of L - 1 tokens, and one more.
    """
    values, token_ids = logits.double().topk(top_k)
    each = torch.zeros(logits.shape, dtype=torch.float64).scatter(1, token_ids, values.softmax(1))
    reached = torch.zeros(len(logits), dtype=torch.float64)
    reached[0] = 1.0
    for _ in range(length - 1):
        leads = following >= 0
        reached = torch.zeros_like(reached).index_add(0, following[leads], (reached[:, None] * each)[leads])
    return (reached[:, None] * each).flatten()


def _logits(models: Models, texts: Sequence[Sequence[int]]) -> Tensor:
    """The logits of target and drafter behind texts of one length, float32 ``[2, texts, vocabulary]``."""
    return torch.stack([_logits_of(model, texts) for model in models])


def _logits_of(model: Model, texts: Sequence[Sequence[int]]) -> Tensor:
    cached, length = CachedModel(model, len(texts), len(texts[0])), len(texts[0])
    for slot, text in enumerate(texts):
        cached.read(slot, text[:-1])
    last = torch.tensor([text[-1] for text in texts])
    return cached.logits(torch.arange(len(texts)), torch.full_like(last, length - 1), last)
