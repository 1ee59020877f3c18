"""How an edit of a few tokens of each row is told: by what it adds to the bits of their logits, as integers.

Changes of one token by several edits add up to the last one's result, in any order of the additions, and nothing is
changed by adding 0. So entries that stand for nothing are additions of 0, wherever they point, and nobody needs to know
which other edits change a token, as long as each knows what those before it make of the logit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.core.order import indices


class Changes(NamedTuple):
    """What one edit adds to the bits of logits; a token may stand several times if all but one addition are of 0."""

    token_ids: Tensor
    """int64 ``[R, n]``."""
    added: Tensor
    """int32 ``[R, n]``; sums wrap."""


class LogitsBefore(NamedTuple):
    """Logits that can be read by token, after the masks and before every other edit."""

    logits: Tensor
    """float32, bfloat16 or float16 ``[R, >=V]``, before the masks."""
    words: Tensor | None
    """int32 ``[R, >= ceil(V / 32)]``, the bits of tokens that are not masked; None if all are."""

    def of(self, token_ids: Tensor) -> Tensor:
        """The logits of tokens, float32 ``[R, n]``; token ids int64."""
        x = self.logits.gather(1, token_ids).to(torch.float32)
        if self.words is None:
            return x
        bits = (self.words.gather(1, token_ids >> 5) >> (token_ids & 31).to(torch.int32)) & 1
        return torch.where(bits != 0, x, float("-inf"))


def entry_ids(token_ids: Tensor, is_entry: Tensor, vocab_size: int) -> Tensor:
    """The tokens of entries, int64 ``[R, n]``, and a different one for each that stands for nothing, while there are.

    Were it the same for all, a GPU would add their zeros in one place, one after the other.

    Args:
        token_ids: int32 ``[R, n]``.
        is_entry: bool ``[R, n]``, false for what stands for nothing.
        vocab_size: V.
    """
    place = indices(token_ids.shape[1], token_ids.device)
    return torch.where(is_entry, token_ids, place % vocab_size).to(torch.int64)


def changes_of(token_ids: Tensor, before: Tensor, after: Tensor) -> Changes:
    """The changes that turn logits into others, float32 ``[R, n]``, which are the same where nothing is changed."""
    return Changes(token_ids, after.view(torch.int32) - before.view(torch.int32))


def add_changes(bits: Tensor, changes: Changes) -> None:
    """Add changes to the bits of logits, int32 ``[R, V]``, in place."""
    rows = torch.arange(bits.shape[0], device=bits.device)[:, None]
    bits.index_put_((rows, changes.token_ids), changes.added, accumulate=True)
