"""Edits of known inputs: tables with content, so that a stage that edits nothing differs from eager torch.

The requests of ``known_requests.py`` take the slots of a batch in turn, in each round others. Tables are made in memory
of their own that lies as the sampler's does, which nothing here writes.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from compiled_sampler.batch import SampleInputs, VerifyInputs
from compiled_sampler.edit_tables import EditInputs, EditTables, History, HistoryRows, NoiseInputs, StopLists
from compiled_sampler.lowering.known_custom_edits import known_custom
from compiled_sampler.lowering.known_requests import (
    NUM_REQUESTS,
    PROMPT_LENS,
    ids_after,
    known_history,
    known_stops,
    known_tables,
    known_watermarks,
    known_words,
)

_PADDING = 7  # of so many entries one is padding
_STATUSES = 4  # of rows that are recorded


def is_padding(entry: int) -> bool:
    """Whether an entry of a known batch is padding."""
    return entry % _PADDING == _PADDING - 1


def lying_as(values: Tensor, like: Tensor) -> Tensor:
    """The values in a tensor of its own with the dtype, strides and device of another."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.copy_(values)


def has_edits(like: SampleInputs | VerifyInputs) -> bool:
    """Whether a step reads tables of edits."""
    return not (like.edits is None and like.stops is None and like.noise is None)


def known_positions(like: SampleInputs | VerifyInputs, number: int, others: Tensor) -> Tensor:
    """Positions within the texts of the requests and behind them, int64 ``[N]``; every fourth is one of ``others``."""
    source, num_slots = random.Random(-1 - number), like.table.seeds.shape[0]
    length = _history_len(like)
    made = others.tolist()
    for entry in range(len(made)):
        prompt_len = PROMPT_LENS[_request(entry % num_slots, number, len(made))]
        if (entry + number) % 4 != 3:
            made[entry] = source.choice((prompt_len + source.randrange(5), source.randrange(length + 2)))
    return torch.tensor(made)


def known_edits(vocab_size: int, like: SampleInputs | VerifyInputs, number: int, likely: Tensor) -> dict[str, Any]:
    """What edits, stops and noise of a step read, by the names of its inputs.

    Args:
        vocab_size: V.
        like: a batch whose shapes, dtypes, strides and device they have.
        number: of the round.
        likely: int64 ``[N]``, a token of each entry that may be drawn, which then ends its request.
    """
    num_entries = len(like.slots)
    place = _Placed(num_entries, like.table.seeds.shape[0], number)
    made = dict[str, Any]()
    if like.edits is not None:
        made["edits"] = _edit_inputs(vocab_size, like.edits, place, number)
    if like.noise is not None:
        history = known_history(like.noise.history.entries.shape[2], vocab_size)
        made["noise"] = place(NoiseInputs(known_watermarks(), history), like.noise)
    if like.stops is not None:
        made["stops"] = stops = place(known_stops(like.stops.token_ids.shape[1], vocab_size), like.stops)
        _end_at(stops, likely, vocab_size)
    return made


def known_record(
    vocab_size: int, memory: tuple[History, HistoryRows], given: tuple[Any, ...], number: int
) -> tuple[Any, ...]:
    """Arguments of a stage that writes tokens into the history: other tokens, in a known history.

    Args:
        vocab_size: V.
        memory: the history, and the same in rows, as the stage gets them.
        given: slots and positions ``[N]``, tokens ``[N]`` or ``[N, K]``, and as the stage has them, numbers of drafts,
            int64 ``[N]``, the status, int32 ``[N]``, and what ends requests or the slot table.
        number: of the round.
    """
    (history, rows), (_, _, token_ids, *rest) = memory, given
    source, (num_slots, _, length) = random.Random(number), history.entries.shape
    count = len(token_ids)
    place = _Placed(count, num_slots - 1, number)
    known: History = place(known_history(length, vocab_size), history)
    of_entries = [entry if entry < num_slots - 1 and not is_padding(entry) else -1 for entry in range(count)]
    where = [source.randrange(length + 2) for _ in range(count)]
    are_draws, is_end = token_ids.dim() == 1, token_ids.dim() == 2 and isinstance(rest[-1], Tensor)
    are_drafts = not are_draws and not is_end
    tokens = [source.choice((0, vocab_size // 7, 11, vocab_size, -1)) for _ in range(token_ids.numel())]
    ids = torch.tensor(tokens).clamp(max=vocab_size - (not are_drafts)).view(token_ids.shape)
    most = 0 if are_draws else token_ids.shape[1] - is_end
    drafts = torch.tensor([most - (entry + number) % (most + 1) for entry in range(count)])
    if is_end:  # behind the last token nothing is emitted
        ids = torch.where(torch.arange(token_ids.shape[1]) <= drafts[:, None], ids.clamp(min=0), -1)
    status = torch.arange(count) % _STATUSES
    made = [torch.tensor(of_entries), torch.tensor(where), ids]
    numbers = [each for each in given if isinstance(each, Tensor)]
    made += [status if each.dtype is torch.int32 else drafts for each in numbers[len(made) :]]
    as_given = [lying_as(values, each) for values, each in zip(made, numbers, strict=True)]
    known_rows = HistoryRows(*(known.entries.view(each.shape) for each in rows))
    if is_end:
        return known, known_rows, *as_given
    if are_drafts:
        return known, known_rows, *as_given, rest[-1]
    stops: StopLists = place(known_stops(rest[-1].token_ids.shape[1], vocab_size), rest[-1])
    _end_at(stops, torch.where((torch.arange(count) + number) % 3 == 2, 0, ids), vocab_size)
    return known, known_rows, *as_given, stops


def _edit_inputs(vocab_size: int, like: EditInputs, place: _Placed, number: int) -> EditInputs:
    """The tables of a step with the edits of known requests, and the tensors of its call."""
    made, given = known_tables(like.tables, vocab_size), like.given
    if like.custom is not None and like.tables.custom is not None:
        custom = known_custom(like.custom, like.tables.custom, like.given, made.history, vocab_size)
        made = made._replace(custom=custom.tables)
        given = tuple(_by_row(values, each, number) for values, each in zip(custom.given, like.given, strict=True))
    mask = like.token_bitmask
    if mask is not None:
        mask = _by_row(known_words(mask.shape[1]), mask, number)
    tables: EditTables = place(made, like.tables)
    return like._replace(tables=tables, token_bitmask=mask, given=given)


def _end_at(stops: StopLists, likely: Tensor, vocab_size: int) -> None:
    """Let the likely tokens be among those that end the requests."""
    used = min(len(stops.counts), len(likely))
    stops.token_ids[:used].copy_(ids_after(likely[:used].cpu(), stops.token_ids.shape[1], vocab_size))


class _Placed:
    """Puts tables of the known requests into slots, in memory that lies as given tables do.

    What shares memory there shares it here too, so that it is as large, and as aligned.

    Args:
        num_entries: N, of the batch.
        num_slots: S.
        number: of the round.
    """

    def __init__(self, num_entries: int, num_slots: int, number: int) -> None:
        """Make no memory."""
        self._memory = dict[int, torch.UntypedStorage]()
        used = range(min(num_entries, num_slots))
        self._requests = torch.tensor([_request(slot, number, num_entries) for slot in used], dtype=torch.int64)

    def __call__(self, made: Any, like: Any) -> Any:
        """Nested tuples like others, with the numbers of known requests; what is one tensor in both stays."""
        return tree_map(self._placed, made, like)

    def _placed(self, made: Any, like: Any) -> Any:
        if made is like:
            return like
        there = self._lying_as(like)
        there[: len(self._requests)].copy_(made.index_select(0, self._requests))
        return there

    def _lying_as(self, like: Tensor) -> Tensor:
        old = like.untyped_storage()
        if old.data_ptr() not in self._memory:
            memory = torch.zeros(old.nbytes(), dtype=torch.uint8, device=like.device)
            self._memory[old.data_ptr()] = memory.untyped_storage()
        made = torch.empty(0, dtype=like.dtype, device=like.device)
        return made.set_(self._memory[old.data_ptr()], like.storage_offset(), like.shape, like.stride())


def _request(slot: int, number: int, num_entries: int) -> int:
    """The known request in a slot: the rounds of a small batch meet all of them."""
    return (slot + number * num_entries) % NUM_REQUESTS


def _by_row(made: Tensor, like: Tensor, number: int) -> Tensor:
    """The rows of known requests in turn, as many and lying as those of another."""
    rows = torch.arange(like.shape[0]) + number
    return lying_as(made.index_select(0, rows % NUM_REQUESTS), like)


def _history_len(like: SampleInputs | VerifyInputs) -> int:
    """Positions that a step reads, or as many as the prompts have."""
    read = like.noise.history if like.noise is not None else None
    if like.edits is not None and like.edits.tables.history is not None:
        read = like.edits.tables.history
    return max(PROMPT_LENS) if read is None else int(read.entries.shape[2])
