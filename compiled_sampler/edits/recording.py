"""What follows a draw: tokens that end a request, and the record of drawn tokens in the history.

The stages get the history's memory to read, and once to write for each kind of number, so that the record of a token a
row is one kernel; ``changes.py`` says why.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.batch import RowStatus, SampleOutputs, SlotTable, VerifyOutputs
from compiled_sampler.core.order import indices
from compiled_sampler.core.rows import covered_slots, lacks_service
from compiled_sampler.core.stage import holds
from compiled_sampler.edits.history import NO_SUCCESSOR, ORDINAL, SUCCESSOR, TOKEN, UNWRITTEN, History, HistoryRows
from compiled_sampler.edits.min_tokens import StopLists

_NUMBERS = 3  # of a position


class Numbers(NamedTuple):
    """Numbers of one kind that are written into a history, which is taken as one long row of them."""

    places: Tensor  # int64 [N, K]; in the last slot where nothing is written
    values: Tensor  # int32 [N, K]


class Record(NamedTuple):
    """What is written of tokens, by the names of ``HistoryRows``."""

    token: Numbers
    ordinal: Numbers
    successor: Numbers
    before: Numbers


class DrawEnds(NamedTuple):
    """What is known of the rows of a step once their tokens are in the history."""

    status: Tensor  # int32 [R], with HISTORY_EXCEEDED
    finished: Tensor  # bool [R], whether a row's token ends its request


@holds(position_bytes=10)
def record_draws(
    history: History,
    rows: HistoryRows,
    slots: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    status: Tensor,
    stops: StopLists,
    *,
    num_places: int = 0,
) -> DrawEnds:
    """What is known of rows once the token of each is in the history; each slot once."""
    slots = covered_slots(slots, status)
    record = recorded(slots, positions, token_ids[:, None], torch.ones_like(slots), history)
    # with as many places as the history, its search and that of the stops are one kernel
    finished = are_ends(token_ids, status, slots, stops, num_places=num_places)
    ends = DrawEnds(_with_exceeded(status, slots, positions, history), finished)
    write_record(rows, record)
    return ends


@holds(position_bytes=5)
def record_drafts(
    history: History,
    rows: HistoryRows,
    slots: Tensor,
    positions: Tensor,
    draft_token_ids: Tensor,
    num_drafts: Tensor,
    table: SlotTable,
    *,
    vocab_size: int,
) -> None:
    """Write the drafts of covered requests before they are judged."""
    covered = torch.where(lacks_service(table, slots), -1, slots)
    is_token = (draft_token_ids >= 0) & (draft_token_ids < vocab_size)
    # what is no token id is a position without a token
    token_ids = torch.where(is_token, draft_token_ids, UNWRITTEN)
    write_record(rows, recorded(covered, positions, token_ids, num_drafts, history))


@holds(position_bytes=5)
def record_ends(
    history: History,
    rows: HistoryRows,
    slots: Tensor,
    positions: Tensor,
    emitted: Tensor,
    num_drafts: Tensor,
    status: Tensor,
) -> Tensor:
    """The status of requests, int32 ``[N]``, once what each emits is in the history, in place of its drafts."""
    slots = covered_slots(slots, status)
    last = positions + ((emitted >= 0).sum(-1) - 1).clamp(min=0)
    # a draft that was rejected leaves a position without a token
    record = recorded(slots, positions, emitted, num_drafts + 1, history)
    status = _with_exceeded(status, slots, last, history)
    write_record(rows, record)
    return status


def recorded(slots: Tensor, positions: Tensor, token_ids: Tensor, counts: Tensor, history: History) -> Record:
    """The record of up to K tokens of each request, one behind the other; each slot once."""
    slot, offset = slots.clamp(min=0), torch.arange(token_ids.shape[1], device=slots.device)
    most, nowhere = history.entries.shape[2], history.entries.shape[0] - 1
    place = positions[:, None] + offset
    is_written = (slots[:, None] >= 0) & (offset < counts[:, None]) & (place >= 0) & (place < most)
    # a number below 0 is a position that holds no token from now on
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


def write_record(rows: HistoryRows, record: Record) -> None:
    """Write a record into the history, which the rows are."""
    for row, numbers in zip(rows, record, strict=True):
        row.index_put_((numbers.places,), numbers.values)


def _with_exceeded(status: Tensor, slots: Tensor, positions: Tensor, history: History) -> Tensor:
    """The status of rows, with ``HISTORY_EXCEEDED`` where a row reads positions that are not held."""
    reads = (slots >= 0) & (history.is_read[slots.clamp(min=0)] > 0)
    is_beyond = reads & (positions > history.entries.shape[2])
    return torch.where(is_beyond, status | int(RowStatus.HISTORY_EXCEEDED), status)


class Text(NamedTuple):
    """The first tokens of a request, ``UNWRITTEN`` for none."""

    token_ids: Sequence[int]
    prompt_len: int


def entries_of(texts: Sequence[Text], length: int) -> np.ndarray:
    """``History.entries`` of requests, int32 ``[N, 3, length]``."""
    made = np.empty((len(texts), _NUMBERS, length), np.int32)
    made[:, TOKEN], made[:, ORDINAL], made[:, SUCCESSOR] = UNWRITTEN, 0, NO_SUCCESSOR
    counts = np.array([len(text.token_ids) for text in texts])
    request = np.repeat(np.arange(len(texts)), counts)
    place = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
    tokens = np.fromiter(itertools.chain(*(text.token_ids for text in texts)), np.int32, len(request))
    made[request, TOKEN, place] = tokens
    order = np.lexsort((tokens, request))  # positions of one token stand together, in their order
    order = order[tokens[order] != UNWRITTEN]
    if not len(order):
        return made
    request, place, tokens = request[order], place[order], tokens[order]
    is_output = place >= np.array([text.prompt_len for text in texts])[request]
    starts = np.concatenate(([True], (tokens[1:] != tokens[:-1]) | (request[1:] != request[:-1])))
    drawn = np.cumsum(is_output)
    before = np.maximum.accumulate(np.where(starts, drawn - is_output, 0))
    made[request, ORDINAL, place] = drawn - before
    follows = np.flatnonzero(~starts)
    made[request[follows - 1], SUCCESSOR, place[follows - 1]] = place[follows]
    return made


def with_finished(drawn: SampleOutputs, slots: Tensor, stops: StopLists) -> SampleOutputs:
    """The draws of a step, with ``finished``: bool ``[R]``, whether a row's token ends its request."""
    return SampleOutputs(drawn.token_ids, drawn.status, are_ends(drawn.token_ids, drawn.status, slots, stops))


def are_ends(token_ids: Tensor, status: Tensor, slots: Tensor, stops: StopLists, *, num_places: int = 0) -> Tensor:
    """Whether the tokens of rows end their requests, bool ``[R]``."""
    return _is_stop(token_ids[:, None], slots, stops, num_places)[:, 0] | _is_all_masked(status)


def cut_at_stop(made: VerifyOutputs, slots: Tensor, stops: StopLists) -> VerifyOutputs:
    """The tokens of a verification up to the first that ends its request, with ``finished``, bool ``[N]``."""
    ends = _is_stop(made.token_ids, slots, stops)
    place = torch.arange(ends.shape[1], device=ends.device)
    length = torch.where(ends, place + 1, ends.shape[1]).amin(-1)
    emitted = torch.minimum(made.num_emitted, length)
    is_masked = _is_all_masked(made.status) & (made.num_emitted == emitted)
    return VerifyOutputs(
        token_ids=torch.where(place < length[:, None], made.token_ids, -1),
        num_emitted=emitted,
        num_accepted=torch.minimum(made.num_accepted, length),
        num_matching=made.num_matching,
        status=made.status,
        finished=ends.any(-1) | is_masked,
        node_ids=None if made.node_ids is None else torch.where(place[:-1] < length[:, None], made.node_ids, -1),
    )


def _is_stop(token_ids: Tensor, slots: Tensor, stops: StopLists, num_places: int = 0) -> Tensor:
    """Whether tokens end their request: bool ``[N, K]``; -1 never does."""
    slot, width = slots.clamp(min=0), stops.token_ids.shape[1]
    # also places that no list has, up to ``num_places``: one kernel may look at a longer list there
    place = torch.arange(max(width, num_places), device=slots.device)
    is_entry = (place < stops.counts[slot][:, None]) & (slots >= 0)[:, None]
    entries = torch.where(is_entry, stops.token_ids[slot[:, None], place.clamp(max=width - 1)].to(torch.int64), -2)
    return (token_ids[:, :, None] == entries[:, None, :]).any(-1)


def _is_all_masked(status: Tensor) -> Tensor:
    """Whether a row has no token, which ends its request too; false for padding, whose status is -1."""
    return (status >= 0) & ((status & int(RowStatus.ALL_MASKED)) != 0)
