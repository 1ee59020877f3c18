"""Edits that mask a few tokens of each row: which tokens are written, and the logits that they get.

Each function returns ids and values ``[R, n]``, to be written into the edited copy. Entries that stand for nothing
repeat another write of their row, so that two writes of one token always write the same number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.edit_tables import TOKEN, UNWRITTEN, BadWords, History, StopLists

_MASKED = float("-inf")


def without_stops(x: Tensor, slots: Tensor, positions: Tensor, lists: StopLists) -> tuple[Tensor, Tensor]:
    """The tokens that end a request, int64 ``[R, T]``, and their logits: -inf before ``min_tokens`` were drawn.

    Args:
        x: float32 ``[R, V]``.
        slots: int64 ``[R]``; -1 for padding.
        positions: int64 ``[R]``, of the token to draw.
        lists: by slot.
    """
    slot, place, is_edited = _entries(slots, lists.counts, lists.token_ids)
    ids = lists.token_ids[slot[:, None], place].to(torch.int64)
    before = x.gather(1, ids)
    is_early = positions - lists.prompt_lens[slot] < lists.min_tokens[slot]
    return ids, torch.where(is_early[:, None] & is_edited, _MASKED, before)


def without_bad_words(
    x: Tensor, slots: Tensor, positions: Tensor, words: BadWords, history: History
) -> tuple[Tensor, Tensor]:
    """The last tokens of a request's bad words, int64 ``[R, W]``, and their logits: -inf where the rest was drawn.

    Args:
        x: float32 ``[R, V]``.
        slots: int64 ``[R]``; -1 for padding.
        positions: int64 ``[R]``, of the token to draw.
        words: by slot.
        history: by slot.
    """
    slot, place, is_edited = _entries(slots, words.counts, words.token_ids)
    word = words.token_ids[slot[:, None], place]  # [R, W, M]
    begun = _is_begun(word[..., :-1], slot, positions, words.prompt_lens[slot], history)
    ids = word[..., -1].clamp(min=0).to(torch.int64)
    is_masked = ((ids[:, :, None] == ids[:, None, :]) & begun[:, None, :]).any(-1)
    before = x.gather(1, ids)
    return ids, torch.where(is_masked & is_edited, _MASKED, before)


def _is_begun(start: Tensor, slot: Tensor, positions: Tensor, first: Tensor, history: History) -> Tensor:
    """Whether the tokens before a row's own position are these: bool ``[R, W]``.

    Args:
        start: int32 ``[R, W, M - 1]``, ``UNWRITTEN`` for any token.
        slot: int64 ``[R]``.
        positions: int64 ``[R]``.
        first: int64 ``[R]``, the first position that may be compared.
        history: by slot.
    """
    most, length = history.entries.shape[2], start.shape[2]
    place = positions[:, None] - length + torch.arange(length, device=start.device)
    held = history.entries[slot[:, None], TOKEN, place.clamp(0, most - 1)]
    held = torch.where((place >= first[:, None]) & (place < most), held, UNWRITTEN)
    return ((start == UNWRITTEN) | (start == held[:, None, :])).all(-1)


def _entries(slots: Tensor, counts: Tensor, lists: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The slot of each row, int64 ``[R]``, the entries of its list, int64 ``[R, n]``, and whether it has any.

    Behind the last entry stands the first one. Whether there is any is bool ``[R, 1]``, false for padding.
    """
    slot, place = slots.clamp(min=0), torch.arange(lists.shape[1], device=slots.device)
    count = torch.where(slots >= 0, counts[slot], 0)[:, None]
    return slot, torch.where(place < count, place, 0), count > 0
