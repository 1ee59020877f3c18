"""The pass that makes the edited copy of the logits, and the masks that act in it.

Bits of a mask are packed in int32 words, the lowest first, so the bit of token v is bit ``v % 32`` of word ``v // 32``:
the layout of xgrammar. Bits at V and above are never looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.order import indices, row_logits
from compiled_sampler.edit_tables import AllowedIds


def copied(logits: Tensor, *, vocab_size: int) -> Tensor:
    """The logits in new memory, float32 ``[R, V]``, an exact conversion."""
    return row_logits(logits, vocab_size).clone()


def masked_by_row(logits: Tensor, token_bitmask: Tensor, *, vocab_size: int) -> Tensor:
    """A copy of the logits, float32 ``[R, V]``, with -inf where the row's bit is 0.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        token_bitmask: int32 ``[R, >= ceil(V / 32)]``.
        vocab_size: V.
    """
    return _masked(logits, _bits(token_bitmask, vocab_size))


def masked_by_slot(logits: Tensor, slots: Tensor, allowed: AllowedIds, *, vocab_size: int) -> Tensor:
    """A copy of the logits, float32 ``[R, V]``, with -inf for tokens that the request does not allow.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        slots: int64 ``[R]``; -1 for padding.
        allowed: by slot.
        vocab_size: V.
    """
    return _masked(logits, _bits(allowed.words[slots.clamp(min=0)], vocab_size))


def masked_by_both(
    logits: Tensor, token_bitmask: Tensor, slots: Tensor, allowed: AllowedIds, *, vocab_size: int
) -> Tensor:
    """``masked_by_row`` and ``masked_by_slot`` in one pass; arguments as there."""
    words = -(-vocab_size // 32)
    return _masked(logits, _bits(token_bitmask[:, :words] & allowed.words[slots.clamp(min=0)], vocab_size))


def masked_bits(
    token_bitmask: Tensor | None, slots: Tensor, allowed: AllowedIds | None, vocab_size: int
) -> Tensor | None:
    """Whether a row may draw a token, bool ``[R, V]``; None without a mask. Arguments as ``masked_by_both``."""
    words = None if token_bitmask is None else token_bitmask[:, : -(-vocab_size // 32)]
    if allowed is not None:
        of_slot = allowed.words[slots.clamp(min=0)]
        words = of_slot if words is None else words & of_slot
    return None if words is None else _bits(words, vocab_size)


def _masked(logits: Tensor, is_allowed: Tensor) -> Tensor:
    return torch.where(is_allowed, row_logits(logits, is_allowed.shape[1]), float("-inf"))


def _bits(words: Tensor, vocab_size: int) -> Tensor:
    """Bool ``[R, V]`` of words int32 ``[R, >= ceil(V / 32)]``."""
    ids = indices(vocab_size, words.device)
    return (words[:, ids >> 5] >> (ids & 31)) & 1 != 0
