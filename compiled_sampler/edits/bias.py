"""Biases of the logits of tokens that a request names."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.order import indices, without_denormals
from compiled_sampler.edit_tables import BiasLists
from compiled_sampler.edits.changes import EditedTokens, edited_tokens, entry_ids

_MASKED = float("-inf")


def biased_tokens(x: Tensor, slots: Tensor, lists: BiasLists, *, vocab_size: int) -> EditedTokens:
    """What biases change, ``[R, B]``.

    Args:
        x: float32 ``[R, V]``.
        slots: int64 ``[R]``; -1 for padding.
        lists: by slot.
        vocab_size: V.
    """
    slot, place = slots.clamp(min=0), indices(lists.token_ids.shape[1], slots.device)
    is_entry = place < torch.where(slots >= 0, lists.counts[slot], 0)[:, None]
    ids = entry_ids(lists.token_ids[slot], is_entry, vocab_size)
    before = x.gather(1, ids)
    return edited_tokens(ids, before, _biased(before, lists.biases[slot]), is_entry)


def _biased(x: Tensor, bias: Tensor) -> Tensor:
    """Logits with a bias each, float32; one of -inf masks its token, whatever the logit is."""
    return torch.where(bias == _MASKED, _MASKED, without_denormals(without_denormals(x) + bias))
