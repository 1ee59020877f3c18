"""Every text that drafts and draws can lead to from one prompt, with what both models say behind it.

Dims: ``L`` tokens that are drawn, ``C`` contexts of fewer than L tokens, ``V`` tokens that some context keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tools.model.transformer import Model
from tools.toy_engine.cached_model import CachedModel
from tools.toy_engine.speculation import Models


class Contexts(NamedTuple):
    """The contexts in the order of their length, the bare prompt first; token ids are places among the V tokens."""

    target: Tensor
    """float32 ``[C, V]``, logits of the target."""
    draft: Tensor
    """float32 ``[C, V]``, logits of the smaller model."""
    following: Tensor
    """int64 ``[C, V]``, the context with one token more; -1 behind L - 1 tokens and for tokens that nobody draws."""

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.target.shape[1]


def contexts_of(models: Models, prompt: Sequence[int], length: int, top_k: int) -> Contexts:
    """The contexts of a prompt, without the columns of tokens that no context keeps: their laws stay what they were.

    Args:
        models: on the CPU.
        prompt: token ids, one or more.
        length: L.
        top_k: tokens that target and drafter keep in each context.
    """
    texts, found = [tuple(prompt)], [_logits(models, [prompt])]
    children: list[dict[int, int]] = []
    level = [0]
    for _ in range(length - 1):
        kept = [_kept(found[-1][:, n], top_k) for n in range(len(level))]
        for n, token_ids in zip(level, kept, strict=True):
            children.append({token: len(texts) + place for place, token in enumerate(token_ids)})
            texts += [(*texts[n], token) for token in token_ids]
        level = list(range(level[-1] + 1, len(texts)))
        found.append(_logits(models, [texts[n] for n in level]))
    logits = torch.cat(found, 1)
    columns = sorted({token for n in range(len(texts)) for token in _kept(logits[:, n], top_k)})
    place = {token: i for i, token in enumerate(columns)}
    following = torch.full((len(texts), len(columns)), -1)
    for n, of_tokens in enumerate(children):
        for token, child in of_tokens.items():
            following[n, place[token]] = child
    target, draft = logits[:, :, columns]
    return Contexts(target, draft, following)


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


def _kept(logits: Tensor, top_k: int) -> list[int]:
    """The tokens that target or drafter keep, from the logits ``[2, vocabulary]`` of both, ascending."""
    return sorted(set(logits.topk(top_k).indices.flatten().tolist()))


def _logits(models: Models, texts: Sequence[Sequence[int]]) -> Tensor:
    """The logits of target and drafter behind texts of one length, float32 ``[2, texts, vocabulary]``."""
    return torch.stack([_logits_of(model, texts) for model in models])


def _logits_of(model: Model, texts: Sequence[Sequence[int]]) -> Tensor:
    cached, length = CachedModel(model, len(texts), len(texts[0])), len(texts[0])
    for slot, text in enumerate(texts):
        cached.read(slot, text[:-1])
    last = torch.tensor([text[-1] for text in texts])
    return cached.logits(torch.arange(len(texts)), torch.full_like(last, length - 1), last)
