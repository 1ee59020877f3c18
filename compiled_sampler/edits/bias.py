"""Biases of logits: of the tokens that a request names, and of any token that is looked up among them."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.order import indices, without_denormals
from compiled_sampler.edit_tables import BiasLists
from compiled_sampler.edits.changes import Changes, LogitsBefore, changes_of, entry_ids

_MASKED = float("-inf")


def bias_changes(before: LogitsBefore, slots: Tensor, lists: BiasLists, *, vocab_size: int) -> Changes:
    """What biases change, ``[R, B]``.

    Args:
        before: the logits.
        slots: int64 ``[R]``; -1 for padding.
        lists: by slot.
        vocab_size: V.
    """
    slot, place = slots.clamp(min=0), indices(lists.token_ids.shape[1], slots.device)
    is_entry = place < torch.where(slots >= 0, lists.counts[slot], 0)[:, None]
    ids = entry_ids(lists.token_ids[slot], is_entry, vocab_size)
    x = before.of(ids)
    return changes_of(ids, x, torch.where(is_entry, _biased(x, lists.biases[slot]), x))


def with_bias(x: Tensor, token_ids: Tensor, slots: Tensor, lists: BiasLists) -> Tensor:
    """Logits of any tokens after the bias of each, if its request has one: float32 ``[R, n]``.

    Args:
        x: float32 ``[R, n]``.
        token_ids: int64 ``[R, n]``.
        slots: int64 ``[R]``; -1 for padding, which reads slot 0.
        lists: by slot.
    """
    slot, most = slots.clamp(min=0)[:, None], lists.token_ids.shape[1]
    place = torch.zeros_like(token_ids)
    for step in (2**bit for bit in reversed(range(most.bit_length()))):  # to how many ids of the list are smaller
        is_passed = lists.token_ids[slot, (place + step - 1).clamp(max=most - 1)] < token_ids
        place = torch.where(is_passed, place + step, place)
    place = place.clamp(max=most - 1)
    is_found = lists.token_ids[slot, place] == token_ids
    return torch.where(is_found, _biased(x, lists.biases[slot, place]), x)


def _biased(x: Tensor, bias: Tensor) -> Tensor:
    """Logits with a bias each, float32; one of -inf masks its token, whatever the logit is."""
    return torch.where(bias == _MASKED, _MASKED, without_denormals(without_denormals(x) + bias))
