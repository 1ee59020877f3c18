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


def masked(
    logits: Tensor, token_bitmask: Tensor | None, slots: Tensor, allowed: AllowedIds | None, *, vocab_size: int
) -> Tensor:
    """The logits, float32 ``[R, V]``, with -inf for tokens that a row may not draw; in new memory if there is a mask.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        token_bitmask: int32 ``[R, >= ceil(V / 32)]``, by row; None for no mask.
        slots: int64 ``[R]``; -1 for padding.
        allowed: by slot; None if every token is.
        vocab_size: V.
    """
    x = row_logits(logits, vocab_size)
    words = None if token_bitmask is None else token_bitmask[:, : -(-vocab_size // 32)]
    if allowed is not None:
        of_slot = allowed.words[slots.clamp(min=0)]
        words = of_slot if words is None else words & of_slot
    return x if words is None else torch.where(_bits(words, vocab_size), x, float("-inf"))


def _bits(words: Tensor, vocab_size: int) -> Tensor:
    """Bool ``[R, V]`` of words int32 ``[R, >= ceil(V / 32)]``."""
    ids = indices(vocab_size, words.device)
    return (words[:, ids >> 5] >> (ids & 31)) & 1 != 0
