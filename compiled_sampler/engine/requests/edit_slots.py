"""The edits of requests by slot: what each needs, and the tables that steps read, written when a request is added."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.edits import EDIT_SPECS, LIST_SPECS
from compiled_sampler.edits.allowed_token_ids import ALLOWED_TOKEN_IDS
from compiled_sampler.edits.edit_spec import PROMPT_LEN, Column, EditSizes, EditSpec, SlotRow
from compiled_sampler.edits.history import READS_HISTORY, TOKEN, UNWRITTEN, History, HistoryRows
from compiled_sampler.edits.min_tokens import STOPS, StopLists
from compiled_sampler.edits.names import CONSUMES, LEAVES, MASK, RESTORE, RESTORES, SILENT, reading
from compiled_sampler.edits.recording import Text, entries_of, recorded, write_record
from compiled_sampler.edits.tables import EditInputs, EditTables, NoiseInputs, RowFilters
from compiled_sampler.edits.watermark import WATERMARK
from compiled_sampler.engine.requests.custom_edits import CustomEditSet
from compiled_sampler.engine.requests.uploads import ARRAY_DTYPES, LEAST_ENTRIES, send_rows, sent
from compiled_sampler.logit_edit import CustomEdits
from compiled_sampler.params import SamplingParams
from compiled_sampler.scalars import check_choice, checked_int
from graph_cache import part_of

_NEUTRAL = SamplingParams(seed=0)
_SENT_NUMBERS = 2**22  # of the histories that are sent together
_AT_ONCE = 64  # tokens of one request that are recorded together; work grows with their square


class EditSlots:
    """The edits of the requests by slot; nothing is allocated before a request or a capture needs it."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        sizes: EditSizes,
        history_len: int,
        device: torch.device,
        custom: CustomEditSet,
    ) -> None:
        self.custom = custom
        self._shape, self._sizes, self._device = (num_slots, vocab_size), sizes, device
        self._history_len = history_len
        self._custom_numbers = Column(
            lambda params, row: custom.numbers_of(params),
            off=None,
            dtype=torch.int64,
            shape=lambda sizes, vocab_size: (custom.num_columns,),
        )
        self._layout = RowLayout(sizes, vocab_size, [self._custom_numbers] if custom.names else [])
        self._rows: Tensor | None = None
        self._history: TokenHistory | None = None
        self._pending: dict[int, tuple[np.ndarray, Text | None]] = {}  # what the device is yet to get, by slot
        self._tables: dict[tuple[str, ...], tuple[EditTables, CustomEdits | None]] = {}
        self._words: dict[int, int] = {}  # of a slot's row that may differ from those of a request without edits

    @property
    def num_bytes(self) -> int:
        """Bytes of the tables, the history and the state of the user's edits on the device."""
        history = () if self._history is None else (self._history.table.entries,)
        rows = () if self._rows is None else (self._rows,)
        return sum(tensor.nbytes for tensor in (*rows, *history, *self.custom.states.every))

    def checked(self, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> tuple[str, ...]:
        """The names of the edits of a request that can be added."""
        edits = params.edits
        if not (edits or prompt or output):
            return edits
        self.custom.check(params)
        edits = self.custom.expanded(edits)
        if edits:
            check_fits(params, edits, self._sizes, self._shape[1])
        found, count = reading(edits), len(prompt) + len(output)
        if found and not self._history_len:
            raise ValueError(f"history_len must be > 0 for {' and '.join(found)}, got 0; Sampler(history_len=...)")
        if found and count > self._history_len:
            raise ValueError(
                f"prompt_token_ids and output_token_ids must be at most history_len {self._history_len} tokens, got "
                f"{count}; Sampler(history_len=...)"
            )
        return edits

    def add(
        self, slot: int, params: SamplingParams, edits: tuple[str, ...], prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """Write the edits of a new request, from ``checked``, on the host; ``upload`` brings them to the device.

        What the user's edits keep by slot begins on the device at once.
        """
        # Nothing is noted before all is made: after an interrupt the slot's next request must still reset these words.
        before = self._words.get(slot, 0)
        if slot in self._pending:
            before = max(before, len(self._pending[slot][0]))
        if not edits:
            if before:
                self._pending[slot] = self._layout.row_of(_NEUTRAL, (), 0, False, before), None
                self._words.pop(slot, None)
            return
        words = self._layout.num_words_of(edits)
        begins = bool(reading(edits))
        row = self._layout.row_of(params, edits, len(prompt), begins, max(words, before))
        text = Text(self._without_foreign((*prompt, *output)), len(prompt)) if begins else None
        self._pending[slot] = row, text
        self._words[slot] = words
        self.custom.states.begin(slot, [name for name, _ in params.custom])

    def served(self, names: Collection[str]) -> tuple[str, ...]:
        """The edits of requests among the names of a caller, in their order, with what these need besides.

        What comes with a call, a mask and leave to write logits, is no edit of a request and is left out.
        """
        if isinstance(names, str) or not isinstance(names, Collection):
            raise TypeError(f"edits must be a list of names, got {names!r}; ['penalties', 'stops']")
        known = self.custom.all_names
        for name in names:
            check_choice("edits", name, known, "SamplingParams.edits has those of a request")
        edits = self.custom.expanded([name for name in names if name not in (MASK, *LEAVES)])
        if reading(edits) and not self._history_len:
            found = " and ".join(reading(edits))
            raise ValueError(f"edits must not be {found} without a history, got {edits}; Sampler(history_len=...)")
        return edits

    def prepare(self, edits: Sequence[str]) -> None:
        """Allocate what steps with these edits read, since a capture may be the first to run one."""
        if edits:
            _ = self.rows
        if reading(edits):
            _ = self.history

    def upload(self) -> None:
        """Bring the edits of added requests to the device, on the current stream and without a wait."""
        if not self._pending:
            return
        pending = sorted(self._pending.items())
        for words in {len(row) for _, (row, _) in pending}:  # lists are thousands of words, and rare
            part = {slot: row for slot, (row, _) in pending if len(row) == words}
            send_rows([*part], np.stack([*part.values()]), self.rows[:, :words])
        texts = {slot: text for slot, (_, text) in pending if text is not None}
        if texts:
            self.history.begin(texts)
        self._pending.clear()  # only now: where the device fails, a later upload tries again

    def set_history(self, slot: int, position: int, token_ids: Sequence[int]) -> None:
        """Write tokens of a request from a position on, and forget what stands behind them."""
        position = checked_int("position", position)
        end = position + len(token_ids)
        if not 0 <= position <= end <= self._history_len:
            raise ValueError(
                f"positions must be in [0, history_len), here {self._history_len}, got {position} to {end - 1}; "
                "Sampler(history_len=...)"
            )
        self.history.replace(slot, position, self._without_foreign(token_ids))

    def _without_foreign(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens of a text for the history, ``UNWRITTEN`` for ids that no logit has: placeholders of images."""
        vocab_size = self._shape[1]
        if max(token_ids, default=0) < vocab_size:
            return token_ids
        return [token if token < vocab_size else UNWRITTEN for token in token_ids]

    @property
    def rows(self) -> Tensor:
        """int32 ``[max(S, 2), num_words]``, the edits of every slot on the device."""
        if self._rows is None:
            neutral = self._layout.row_of(_NEUTRAL, (), 0, False)
            with torch.inference_mode(False):
                self._rows = sent(neutral, self._device).repeat(max(self._shape[0], LEAST_ENTRIES), 1)
        return self._rows

    @property
    def history(self) -> TokenHistory:
        """The history; there must be one."""
        if self._history is None:
            numbers = self._column(PROMPT_LEN), self._column(READS_HISTORY)
            self._history = TokenHistory(self._shape[0], self._history_len, *numbers, self._device)
        return self._history

    def inputs(self, edits: tuple[str, ...], given: Mapping[str, Tensor], processed_scale: Tensor) -> EditInputs | None:
        """What a step with these edits reads; None if none acts on logits."""
        if set(edits) <= {*SILENT}:
            return None
        if edits not in self._tables:
            self._tables[edits] = self._new_tables(edits, processed_scale), self.custom.step(edits)
        tables, custom = self._tables[edits]
        of_custom = tuple(given[name] for name in self.custom.inputs(edits))
        leave = RESTORE if RESTORES in edits else CONSUMES in edits
        return EditInputs(tables, given.get(MASK), leave, custom, of_custom)

    def _new_tables(self, edits: tuple[str, ...], processed_scale: Tensor) -> EditTables:
        is_custom = not {*self.custom.names}.isdisjoint(edits)
        filters = [self._table(spec) for spec in EDIT_SPECS if spec.kind == "filter" and spec.name in edits]
        return EditTables(
            allowed=self._table(ALLOWED_TOKEN_IDS) if ALLOWED_TOKEN_IDS.name in edits else None,
            lists=tuple(self._table(spec) for spec in LIST_SPECS if spec.name in edits),
            history=self.history.table if reading(edits) else None,
            custom=self.custom.tables(edits, self._column(self._custom_numbers)) if is_custom else None,
            filters=RowFilters(processed_scale, tuple(filters)) if filters else None,
        )

    def noise(self, edits: Sequence[str]) -> NoiseInputs | None:
        """What keys the noise of a step with these edits; None where it is the position."""
        return self._noise if WATERMARK.name in edits else None

    @functools.cached_property
    def _noise(self) -> NoiseInputs:
        return NoiseInputs(self._table(WATERMARK), self.history.table)

    @functools.cached_property
    def stops(self) -> StopLists:
        """The tokens that end requests, and how many must be drawn before."""
        stops: StopLists = self._table(STOPS)
        return stops

    def _table(self, spec: EditSpec) -> Any:
        """The table of an edit by slot."""
        assert spec.table is not None
        return spec.table(**{name: self._column(column) for name, column in spec.columns.items()})

    def _column(self, column: Column) -> Tensor:
        """The numbers of all slots in a column, ``[S, *shape]``."""
        rows, shape, dtype = self.rows, self._layout.shapes[column], column.dtype
        strides = (
            rows.shape[1] * rows.itemsize // dtype.itemsize,
            *(() if len(shape) < 2 else (shape[1],)),
            *((1,) if shape else ()),
        )
        with torch.inference_mode(False):
            return part_of(rows, dtype, self._layout.starts[column], (rows.shape[0], *shape), strides)


_ALIGNED = 16  # words; kernels clone what is not aligned


def checked_edit_sizes(sizes: EditSizes | None) -> EditSizes:
    """The sizes that a caller gave, or the default."""
    if sizes is not None and not isinstance(sizes, EditSizes):
        raise TypeError(f"edit_sizes must be EditSizes, got {type(sizes).__name__}; EditSizes(biases=...)")
    return sizes or EditSizes()


def check_fits(params: SamplingParams, edits: Sequence[str], sizes: EditSizes, vocab_size: int) -> None:
    """Raise unless the edits of a request have room in a row, and ask nothing of ids that the vocabulary lacks."""
    for spec in EDIT_SPECS:
        if spec.name in edits:
            spec.check_fits(params, sizes, vocab_size)


class RowLayout:
    """The columns of a slot's row: first single numbers, the smaller before the larger, then lists, each aligned."""

    def __init__(self, sizes: EditSizes, vocab_size: int, further: Sequence[Column] = ()) -> None:
        self._sizes, self._vocab_size = sizes, vocab_size
        declared = (column for spec in EDIT_SPECS for column in spec.columns.values())
        columns = list(dict.fromkeys((*declared, *further)))
        self.shapes = {column: column.shape(sizes, vocab_size) for column in columns}
        self.starts, end = dict[Column, int](), 0
        for column in sorted(columns, key=lambda column: (self.shapes[column] != (), column.dtype.itemsize)):
            words = column.dtype.itemsize // torch.int32.itemsize
            aligned = _ALIGNED if self.shapes[column] else words
            start = -(-end // aligned) * aligned
            self.starts[column], end = start, start + words * math.prod(self.shapes[column])
            if not self.shapes[column]:
                self._num_single = -(-end // _ALIGNED) * _ALIGNED
        self.num_words = -(-end // _ALIGNED) * _ALIGNED
        self._without_edits = np.zeros(self.num_words, np.int32)
        for column in columns:
            self._part(self._without_edits, column)[...] = column.off or 0
        self._of_every = [column for column in columns if column.off is None]
        self._dtypes = {column.dtype for column in columns}

    def num_words_of(self, edits: Sequence[str]) -> int:
        """The words at a row's beginning that requests with these edits, or with none, may set."""
        columns = (column for spec in EDIT_SPECS if spec.name in edits for column in spec.columns.values())
        has_lists = any(self.shapes[column] for column in (*self._of_every, *columns))
        return self.num_words if has_lists else self._num_single

    def row_of(
        self,
        params: SamplingParams,
        edits: Sequence[str],
        prompt_len: int,
        reads_history: bool,
        num_words: int | None = None,
    ) -> np.ndarray:
        """The row of a request with these edits, int32; at most its first words; ``check_fits`` has looked at it."""
        row = self._without_edits[:num_words].copy()
        slot_row = SlotRow(prompt_len, reads_history, self._sizes, self._vocab_size)
        used = (column for spec in EDIT_SPECS if spec.name in edits for column in spec.columns.values())
        numbers = {dtype: row.view(ARRAY_DTYPES[dtype]) for dtype in self._dtypes}
        for column in dict.fromkeys((*self._of_every, *used)):
            value = column.value(params, slot_row)
            if self.shapes[column]:
                values = np.asarray(value)
                self._part(row, column)[tuple(map(slice, values.shape))] = values
            else:
                numbers[column.dtype][self.starts[column] * torch.int32.itemsize // column.dtype.itemsize] = value
        return row

    def _part(self, row: np.ndarray, column: Column) -> np.ndarray:
        """The numbers of a column in a row, which share its memory."""
        shape, words = self.shapes[column], column.dtype.itemsize // torch.int32.itemsize
        start = self.starts[column]
        return row[start : start + words * math.prod(shape)].view(ARRAY_DTYPES[column.dtype]).reshape(shape)


class TokenHistory:
    """A history of one size, which steps read and write in place."""

    def __init__(self, num_slots: int, length: int, prompt_lens: Tensor, is_read: Tensor, device: torch.device) -> None:
        # prompt_lens and is_read, int32 [S], are written by the owner.
        with torch.inference_mode(False):
            entries = sent(entries_of([Text((), 0)], length), device).repeat(num_slots + 1, 1, 1)
        # entries [S + 1, 3, L]; the last slot takes what padding writes
        self.table = History(entries, prompt_lens, is_read)

    @property
    def memory(self) -> tuple[History, HistoryRows]:
        """The history to read, and its numbers in one row to write: the same memory."""
        return self.table, HistoryRows(*4 * (self.table.entries.view(-1),))

    def begin(self, texts: Mapping[int, Text]) -> None:
        """Send the histories of requests by slot, in ascending order, on the current stream and without a wait."""
        entries, slots = self.table.entries, [*texts]
        at_once = max(1, _SENT_NUMBERS // entries[0].numel())
        for first in range(0, len(slots), at_once):
            part = slots[first : first + at_once]
            send_rows(part, entries_of([texts[slot] for slot in part], entries.shape[2]), entries)

    def replace(self, slot: int, position: int, token_ids: Sequence[int]) -> None:
        """Write tokens of one request, and forget what stands behind them."""
        for first in range(0, len(token_ids), _AT_ONCE):
            part = token_ids[first : first + _AT_ONCE]
            numbers = sent(np.array([slot, position + first, len(part), *part], np.int64), self.table.entries.device)
            history, rows = self.memory
            write_record(rows, recorded(numbers[:1], numbers[1:2], numbers[None, 3:], numbers[2:3], history))
        self.table.entries[slot, TOKEN, position + len(token_ids) :] = UNWRITTEN
