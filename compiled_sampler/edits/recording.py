"""What the history becomes when tokens are written at consecutive positions: by ``written.py``, and by the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.batch import RowStatus
from compiled_sampler.core.order import indices
from compiled_sampler.core.rows import covered_slots
from compiled_sampler.edits.history import NO_SUCCESSOR, ORDINAL, SUCCESSOR, TOKEN, UNWRITTEN, History
from compiled_sampler.edits.min_tokens import StopLists
from compiled_sampler.edits.stops import are_ends

_NUMBERS = 3  # of a position


class Numbers(NamedTuple):
    """Numbers of one kind that are written into a history, which is taken as one long row of them."""

    places: Tensor
    """int64 ``[N, K]``; in the last slot where nothing is written."""
    values: Tensor
    """int32 ``[N, K]``."""


class Record(NamedTuple):
    """What is written of tokens, by the names of ``HistoryRows``."""

    token: Numbers
    ordinal: Numbers
    successor: Numbers
    before: Numbers


class DrawEnds(NamedTuple):
    """What is known of the rows of a step once their tokens are in the history."""

    status: Tensor
    """int32 ``[R]``, with ``HISTORY_EXCEEDED``."""
    finished: Tensor
    """bool ``[R]``, whether a row's token ends its request."""


def recorded(slots: Tensor, positions: Tensor, token_ids: Tensor, counts: Tensor, history: History) -> Record:
    """The record of up to K tokens of each request, one behind the other.

    Args:
        slots: int64 ``[N]``, each once; -1 for padding.
        positions: int64 ``[N]``, of the first token.
        token_ids: int64 ``[N, K]``; a number below 0 is a position that holds no token from now on.
        counts: int64 ``[N]``, tokens of each request, at most K; what is behind them is not written.
        history: by slot.
    """
    slot, offset = slots.clamp(min=0), torch.arange(token_ids.shape[1], device=slots.device)
    most, nowhere = history.entries.shape[2], history.entries.shape[0] - 1
    place = positions[:, None] + offset
    is_written = (slots[:, None] >= 0) & (offset < counts[:, None]) & (place >= 0) & (place < most)
    is_token = is_written & (token_ids >= 0)
    earlier = _latest(slot, positions, token_ids, history)  # [N, K], -1 for none
    is_output = place >= history.prompt_lens[slot][:, None]
    same = (token_ids[:, :, None] == token_ids[:, None, :]) & is_token[:, :, None] & is_token[:, None, :]  # [N, K, K]
    known = history.entries[slot[:, None], ORDINAL, earlier.clamp(min=0)].to(torch.int64)
    up_to = same & (offset[:, None] >= offset) & is_output[:, None, :]
    drawn = torch.where(earlier >= 0, known, 0) + up_to.sum(-1)
    following = torch.where(same & (offset[:, None] < offset), place[:, None, :], NO_SUCCESSOR).amin(-1)
    is_first = is_token & ~(same & (offset[:, None] > offset)).any(-1)
    here = torch.where(is_written, slot[:, None] * (_NUMBERS * most) + place, nowhere * (_NUMBERS * most))
    found = is_first & (earlier >= 0)
    before = torch.where(found, slot[:, None] * (_NUMBERS * most) + earlier, nowhere * (_NUMBERS * most))
    return Record(
        token=_numbers(here + TOKEN * most, torch.where(is_token, token_ids, UNWRITTEN)),
        ordinal=_numbers(here + ORDINAL * most, drawn),
        successor=_numbers(here + SUCCESSOR * most, following),
        before=_numbers(before + SUCCESSOR * most, place),
    )


def _numbers(places: Tensor, values: Tensor) -> Numbers:
    return Numbers(places, values.to(torch.int32))


def _latest(slot: Tensor, positions: Tensor, token_ids: Tensor, history: History) -> Tensor:
    """The last position before ``positions`` that holds each token: int64 ``[N, K]``, -1 for none."""
    held = history.entries[slot, TOKEN]  # [N, L]
    place, end = indices(held.shape[1], slot.device), positions.clamp(max=held.shape[1]).to(torch.int32)
    is_held = (held[:, None, :] == token_ids.to(torch.int32)[:, :, None]) & (place < end[:, None, None])
    return torch.where(is_held, place, -1).amax(-1).to(torch.int64)


def recorded_draws(
    slots: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    status: Tensor,
    stops: StopLists,
    history: History,
    *,
    num_places: int,
) -> tuple[Record, DrawEnds]:
    """The record of a token a request, and what is known of the rows then.

    Args:
        slots: int64 ``[R]``, each once; -1 for padding.
        positions: int64 ``[R]``.
        token_ids: int64 ``[R]``; -1 where a row is all masked.
        status: int32 ``[R]``.
        stops: by slot.
        history: by slot.
        num_places: see ``are_ends``; with those of the history, its search and that of the stops are one kernel.
    """
    slots = covered_slots(slots, status)
    record = recorded(slots, positions, token_ids[:, None], torch.ones_like(slots), history)
    finished = are_ends(token_ids, status, slots, stops, num_places=num_places)
    return record, DrawEnds(_with_exceeded(status, slots, positions, history), finished)


def recorded_drafts(
    slots: Tensor, positions: Tensor, draft_token_ids: Tensor, num_drafts: Tensor, history: History, *, vocab_size: int
) -> Record:
    """The record of drafts before they are judged; those that are no token ids are positions without a token.

    Args:
        slots: int64 ``[N]``, each once; -1 for padding.
        positions: int64 ``[N]``, of the first draft.
        draft_token_ids: int64 ``[N, K]``.
        num_drafts: int64 ``[N]``; -1 for padding.
        history: by slot.
        vocab_size: V.
    """
    is_token = (draft_token_ids >= 0) & (draft_token_ids < vocab_size)
    return recorded(slots, positions, torch.where(is_token, draft_token_ids, UNWRITTEN), num_drafts, history)


def recorded_ends(
    slots: Tensor, positions: Tensor, emitted: Tensor, num_drafts: Tensor, status: Tensor, history: History
) -> tuple[Record, Tensor]:
    """The record of the tokens that each request emits, in place of its drafts; and the status as above.

    A draft that was rejected leaves a position without a token.

    Args:
        slots: int64 ``[N]``, each once; -1 for padding.
        positions: int64 ``[N]``, of the first token.
        emitted: int64 ``[N, K+1]``; -1 behind the last one.
        num_drafts: int64 ``[N]``; -1 for padding.
        status: int32 ``[N]``.
        history: by slot.
    """
    slots = covered_slots(slots, status)
    last = positions + ((emitted >= 0).sum(-1) - 1).clamp(min=0)
    return recorded(slots, positions, emitted, num_drafts + 1, history), _with_exceeded(status, slots, last, history)


def _with_exceeded(status: Tensor, slots: Tensor, positions: Tensor, history: History) -> Tensor:
    """The status of rows, with ``HISTORY_EXCEEDED`` where a row reads positions that are not held."""
    reads = (slots >= 0) & (history.is_read[slots.clamp(min=0)] > 0)
    is_beyond = reads & (positions > history.entries.shape[2])
    return torch.where(is_beyond, status | int(RowStatus.HISTORY_EXCEEDED), status)


def entries_of(token_ids: Sequence[int], prompt_len: int, length: int) -> np.ndarray:
    """``History.entries`` of one request, int32 ``[3, length]``, whose first tokens are known.

    Args:
        token_ids: of the positions from 0 on, at most ``length``; ``UNWRITTEN`` for one that counts for nothing.
        prompt_len: how many of them are the prompt's.
        length: L.
    """
    made = np.empty((3, length), np.int32)
    made[:] = np.array([UNWRITTEN, 0, NO_SUCCESSOR])[:, None]
    count = len(token_ids)
    if not count:
        return made
    tokens = np.array(token_ids, np.int32)
    made[TOKEN, :count] = tokens
    order = np.argsort(tokens, kind="stable")  # positions of one token stand together, in their order
    order = order[tokens[order] != UNWRITTEN]
    if not len(order):
        return made
    is_output = order >= prompt_len
    starts = np.r_[True, tokens[order[1:]] != tokens[order[:-1]]]
    drawn = np.cumsum(is_output)
    before = np.maximum.accumulate(np.where(starts, drawn - is_output, 0))
    made[ORDINAL, order] = drawn - before
    made[SUCCESSOR, order[:-1][~starts[1:]]] = order[1:][~starts[1:]]
    return made
