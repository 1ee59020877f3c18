"""Masks of tokens, in a copy of the logits or beside them, and the pass that makes the copy.

Bits of a mask are packed in int32 words, the lowest first, so the bit of token v is bit ``v % 32`` of word ``v // 32``:
the layout of xgrammar. Bits at V and above are never looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import PickedRows
from compiled_sampler.core.order import indices, row_logits
from compiled_sampler.core.stage import holds
from compiled_sampler.edits.allowed_token_ids import AllowedIds


class MaskedLogits(NamedTuple):
    """Logits with their masks beside them, for passes that mask what they read: it stands for a copy with -inf."""

    logits: Tensor  # float32, bfloat16 or float16 [R, >=V], before the masks
    token_bitmask: Tensor | None  # int32 [R, >= ceil(V / 32)], by row; None for no mask
    slots: Tensor  # int64 [R]; -1 for padding
    allowed: AllowedIds | None  # by slot; None if every token is

    def words(self, vocab_size: int) -> Tensor:
        """The bits of the tokens that each row may draw, int32 ``[R, ceil(V / 32)]``."""
        words = row_words(self.token_bitmask, self.slots, self.allowed, vocab_size=vocab_size)
        assert words is not None
        return words

    def words_at(self, token_ids: Tensor) -> Tensor:
        """The words that hold the bits of tokens, int32 ``[R, n]``; token ids int64 ``[R, n]``."""
        places = token_ids >> 5
        words = None if self.token_bitmask is None else self.token_bitmask.gather(1, places)
        if self.allowed is None:
            assert words is not None
            return words
        of_slot = self.allowed.words[self.slots.clamp(min=0)[:, None], places]
        return of_slot if words is None else words & of_slot


def copied(logits: Tensor | PickedRows, *, vocab_size: int) -> Tensor:
    """The logits in new memory, float32 ``[R, V]``, an exact conversion."""
    x = _float_rows(logits, vocab_size)
    return x.clone() if isinstance(logits, Tensor) else x


@holds(tokens=True)
def masked(
    logits: Tensor | PickedRows,
    token_bitmask: Tensor | None,
    slots: Tensor,
    allowed: AllowedIds | None,
    *,
    vocab_size: int,
) -> Tensor:
    """Logits, float32 ``[R, V]``, with -inf for tokens that a row may not draw; in new memory if there is a mask."""
    x, words = _float_rows(logits, vocab_size), row_words(token_bitmask, slots, allowed, vocab_size=vocab_size)
    return x if words is None else unmasked(x, token_words(words, vocab_size), indices(vocab_size, x.device))


def _float_rows(logits: Tensor | PickedRows, vocab_size: int) -> Tensor:
    """Float32 logits ``[R, V]``, an exact conversion; those of picked rows are in new memory."""
    if isinstance(logits, Tensor):
        return row_logits(logits, vocab_size)
    return logits.values[:, :vocab_size][logits.row_ids].to(torch.float32)


def row_words(
    token_bitmask: Tensor | None, slots: Tensor, allowed: AllowedIds | None, *, vocab_size: int
) -> Tensor | None:
    """The bits of the tokens that each row may draw, int32 ``[R, ceil(V / 32)]``; None for all."""
    words = None if token_bitmask is None else token_bitmask[:, : -(-vocab_size // 32)]
    if allowed is None:
        return words
    of_slot = allowed.words[slots.clamp(min=0)]
    return of_slot if words is None else words & of_slot


def token_words(words: Tensor, vocab_size: int) -> Tensor:
    """The word that holds the bit of each token, int32 ``[R, V]``, of words int32 ``[R, ceil(V / 32)]``."""
    # Indexed, not repeated by a view: of such a row Inductor's C++ loses what is behind the last whole word.
    return words[:, indices(vocab_size, words.device) >> 5]


def has_bit(words: Tensor, ids: Tensor) -> Tensor:
    """Whether tokens may be drawn, bool, of int32 ids and the words that hold their bits; shapes broadcast."""
    return words & (1 << (ids & 31)) != 0


def unmasked(x: Tensor, words: Tensor, ids: Tensor) -> Tensor:
    """Logits of tokens with -inf for those that may not be drawn; arguments as ``has_bit``."""
    return torch.where(has_bit(words, ids), x, float("-inf"))
