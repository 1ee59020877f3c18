"""The pass that makes the edited copy of the logits, and the masks that act in it.

Bits of a mask are packed in int32 words, the lowest first, so the bit of token v is bit ``v % 32`` of word ``v // 32``:
the layout of xgrammar. Bits at V and above are never looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.order import indices, row_logits
from compiled_sampler.edit_tables import AllowedIds

_NEGATIVE_INFINITY = -(2**23)  # the bits of -inf


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
    x, words = row_logits(logits, vocab_size), row_words(token_bitmask, slots, allowed, vocab_size=vocab_size)
    return x if words is None else torch.where(_bits(words, vocab_size), x, float("-inf"))


def masked_bits(logits: Tensor, words: Tensor | None, *, vocab_size: int) -> Tensor:
    """The bits of the logits, int32 ``[R, V]`` in new memory, with those of -inf for masked tokens.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        words: int32 ``[R, >= ceil(V / 32)]``; None for no mask.
        vocab_size: V.
    """
    bits = row_logits(logits, vocab_size).view(torch.int32)
    # Always chosen, never cloned: Inductor drops a clone of what it converts, and cannot add to the view that is left.
    is_kept = indices(vocab_size, logits.device) >= 0 if words is None else _bits(words, vocab_size)
    return torch.where(is_kept, bits, _NEGATIVE_INFINITY)


def row_words(
    token_bitmask: Tensor | None, slots: Tensor, allowed: AllowedIds | None, *, vocab_size: int
) -> Tensor | None:
    """The bits of the tokens that each row may draw, int32 ``[R, ceil(V / 32)]``; None for all; arguments as above."""
    words = None if token_bitmask is None else token_bitmask[:, : -(-vocab_size // 32)]
    if allowed is None:
        return words
    of_slot = allowed.words[slots.clamp(min=0)]
    return of_slot if words is None else words & of_slot


def _bits(words: Tensor, vocab_size: int) -> Tensor:
    """Bool ``[R, V]`` of words int32 ``[R, >= ceil(V / 32)]``."""
    ids = indices(vocab_size, words.device)
    return (words[:, ids >> 5] >> (ids & 31)) & 1 != 0
