"""What the history becomes when tokens are written at consecutive positions; ``engine/history.py`` writes it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import RowStatus
from compiled_sampler.edit_tables import NO_SUCCESSOR, ORDINAL, TOKEN, UNWRITTEN, History


class Record(NamedTuple):
    """Writes to a history, whose positions are numbered ``slot * L + position``."""

    places: Tensor
    """int64 ``[N, K]``, the positions that are written; the first of the last slot for those that are not held."""
    entries: Tensor
    """int32 ``[N, K, 3]``."""
    before: Tensor
    """int64 ``[N, K]``, the earlier positions that get a successor; the first of the last slot for none."""
    successors: Tensor
    """int32 ``[N, K]``."""


def recorded(slots: Tensor, positions: Tensor, token_ids: Tensor, counts: Tensor, history: History) -> Record:
    """The writes of up to K tokens of each request, one behind the other.

    Args:
        slots: int64 ``[N]``, each once; -1 for padding.
        positions: int64 ``[N]``, of the first token.
        token_ids: int64 ``[N, K]``; a number below 0 is a position that holds no token from now on.
        counts: int64 ``[N]``, tokens of each request, at most K; what is behind them is not written.
        history: by slot.
    """
    slot, width = slots.clamp(min=0), token_ids.shape[1]
    most, nowhere = history.entries.shape[1], (history.entries.shape[0] - 1) * history.entries.shape[1]
    offset = torch.arange(width, device=slots.device)
    place = positions[:, None] + offset
    is_written = (slots[:, None] >= 0) & (offset < counts[:, None]) & (place < most)
    is_token = is_written & (token_ids >= 0)
    earlier = _latest(slot, positions, token_ids, history)  # [N, K], -1 for none
    is_output = place >= history.prompt_lens[slot][:, None]
    same = (token_ids[:, :, None] == token_ids[:, None, :]) & is_token[:, :, None] & is_token[:, None, :]  # [N, K, K]
    up_to = same & (offset[:, None] >= offset)
    behind = same & (offset[:, None] < offset)
    known = history.entries[slot[:, None], earlier.clamp(min=0), ORDINAL].to(torch.int64)
    drawn = torch.where(earlier >= 0, known, 0) + (up_to & is_output[:, None, :]).sum(-1)
    following = torch.where(behind, place[:, None, :], NO_SUCCESSOR).amin(-1)
    entries = torch.stack([torch.where(is_token, token_ids, UNWRITTEN), drawn, following], -1)
    is_first = is_token & ~(same & (offset[:, None] > offset)).any(-1)
    return Record(
        places=torch.where(is_written, slot[:, None] * most + place, nowhere),
        entries=entries.to(torch.int32),
        before=torch.where(is_first & (earlier >= 0), slot[:, None] * most + earlier, nowhere),
        successors=place.to(torch.int32),
    )


def _latest(slot: Tensor, positions: Tensor, token_ids: Tensor, history: History) -> Tensor:
    """The last position before ``positions`` that holds each token: int64 ``[N, K]``, -1 for none."""
    held = history.entries[slot][..., TOKEN]  # [N, L]
    place = torch.arange(held.shape[1], device=slot.device)
    is_held = (held[:, None, :] == token_ids[:, :, None]) & (place < positions[:, None, None])
    return torch.where(is_held, place, -1).amax(-1)


def last_emitted(token_ids: Tensor, num_emitted: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The last token that each request emits, int64 ``[N, 1]``, its position and how many it is, 0 or 1: ``[N]``.

    Args:
        token_ids: int64 ``[N, K+1]``.
        num_emitted: int64 ``[N]``; -1 for padding.
        positions: int64 ``[N]``, of the first token.
    """
    behind = (num_emitted - 1).clamp(min=0)
    return token_ids.gather(1, behind[:, None]), positions + behind, num_emitted.clamp(0, 1)


def tokens_of_drafts(draft_token_ids: Tensor, *, vocab_size: int) -> Tensor:
    """Drafts int64 ``[N, K]``, -1 for those that are no token ids, which a history does not hold."""
    return torch.where((draft_token_ids >= 0) & (draft_token_ids < vocab_size), draft_token_ids, UNWRITTEN)


def with_exceeded(status: Tensor, slots: Tensor, positions: Tensor, history: History) -> Tensor:
    """The status of rows, int32 ``[N]``, with ``HISTORY_EXCEEDED`` where positions below theirs are not held.

    Args:
        status: int32 ``[N]``.
        slots: int64 ``[N]``; -1 for padding.
        positions: int64 ``[N]``, of the last token that was drawn.
        history: by slot.
    """
    is_beyond = (slots >= 0) & (positions > history.entries.shape[1])
    return torch.where(is_beyond, status | int(RowStatus.HISTORY_EXCEEDED), status)
