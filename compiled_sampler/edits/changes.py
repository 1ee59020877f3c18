"""How an edit of a few tokens of each row is told: by what it adds to the bits of their logits, as integers.

Nothing is changed by adding 0. So entries that stand for nothing are additions of 0, wherever they point: they need no
place of their own, and a kernel need not leave them out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.core.order import indices


class EditedTokens(NamedTuple):
    """What one edit adds to the bits of logits; of several entries with one token, all but one add 0."""

    token_ids: Tensor
    """int64 ``[R, n]``; int32 where the edit is kept to be undone."""
    added: Tensor
    """int32 ``[R, n]``; sums wrap."""


def entry_ids(token_ids: Tensor, is_entry: Tensor, vocab_size: int) -> Tensor:
    """The tokens of entries, int64 ``[R, n]``, and a different one for each that stands for nothing, while there are.

    Were it the same for all, a GPU would add their zeros in one place, one after the other.

    Args:
        token_ids: int32 ``[R, n]``.
        is_entry: bool ``[R, n]``, false for what stands for nothing.
        vocab_size: V.
    """
    count = token_ids.shape[1]
    place = indices(count, token_ids.device)
    return torch.where(is_entry, token_ids, place if count <= vocab_size else place % vocab_size).to(torch.int64)


def edited_tokens(token_ids: Tensor, before: Tensor, after: Tensor, is_entry: Tensor) -> EditedTokens:
    """The edit that turns the logits of entries into others; arguments ``[R, n]``, logits float32."""
    added = after.view(torch.int32) - before.view(torch.int32)
    return EditedTokens(token_ids, torch.where(is_entry, added, 0))
