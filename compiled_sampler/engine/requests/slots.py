"""Slots: which request holds which, the modes that cover them, and their parameters as numbers.

The *needs* of a request, or of a batch, are bits: bit i says that mode i of the table does NOT cover it, bit 24 + j
that it has edit j. Padding has none.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import os
import struct
from collections.abc import Sequence
from functools import reduce
from operator import itemgetter, or_
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from compiled_sampler.batch import SlotTable
from compiled_sampler.core.arithmetic import LOG2_E, log2_of_number
from compiled_sampler.edits.edit_spec import EditSizes
from compiled_sampler.edits.names import LEAVES, MASK
from compiled_sampler.engine.boundary.arguments import FEW, numbers_of, words_of
from compiled_sampler.engine.requests.custom_edits import CustomEditSet
from compiled_sampler.engine.requests.edit_slots import EditSlots
from compiled_sampler.engine.requests.uploads import LEAST_ENTRIES, StagedTable
from compiled_sampler.modes import Mode, uncovered
from compiled_sampler.params import SamplingParams
from compiled_sampler.scalars import as_int64
from graph_cache import HostMirror

_MOST_REQUEST_KINDS = 4096  # of requests that are kept
_FREE = 1 << 62  # the bit of a free slot among needs
_FIRST_EDIT = 24  # the bit of the first edit among needs, of at most 38 with those of the user
_BY_CALL = MASK, *LEAVES  # names of edits that come with a call, and are no request's


def slot_values(params: SamplingParams, vocab_size: int) -> tuple[float | int, ...]:
    """The entry of ``SlotTable`` for one request, as Python numbers; of a greedy request without filters and noise."""
    seed = as_int64(params.seed or 0)
    if params.is_greedy:
        return seed, 1.0, 0, 1, 1.0, -math.inf
    return (
        seed,
        LOG2_E / params.temperature,
        -1,
        params.top_k if 0 < params.top_k < vocab_size else vocab_size,
        params.top_p,
        log2_of_number(params.min_p) if params.min_p > 0.0 else -math.inf,
    )


def unfiltered_table(like: SlotTable, vocab_size: int) -> SlotTable:
    """A slot table ``[S]`` of requests that draw at temperature 1 from all V tokens, of the shape of another one."""
    return SlotTable(
        seeds=torch.zeros_like(like.seeds),
        scale=torch.full_like(like.scale, LOG2_E),
        noise_mask=torch.full_like(like.noise_mask, -1),
        top_k=torch.full_like(like.top_k, vocab_size),
        top_p=torch.ones_like(like.top_p),
        min_p_log2=torch.full_like(like.min_p_log2, -math.inf),
        needs=torch.zeros_like(like.needs),
        unserved=torch.zeros_like(like.unserved),
    )


def processed_scale(params: SamplingParams) -> float:
    """``log2(e) / temperature`` of a request, at temperature 1 for temperature 0; greedy by ``top_k`` 1 or not."""
    return LOG2_E / (params.temperature or 1.0)


def words_of_slots(slots: Sequence[int]) -> bytes:
    """The slots of a batch as ``words_of``."""
    try:
        return words_of(slots)
    except struct.error:
        raise no_request(*max(enumerate(slots), key=lambda pair: abs(pair[1]))) from None


def no_request(row: int, slot: int) -> ValueError:
    """The error for a row of a batch whose slot holds no request."""
    return ValueError(f"row {row}: slot must come from add_request() and not be removed, got {slot}; -1 is padding")


def uncovered_modes(modes: Sequence[Mode], params: SamplingParams) -> int:
    """The modes that do not cover a request, as bits: bit i for ``modes[i]``."""
    return sum(1 << i for i, mode in enumerate(modes) if uncovered(mode, params))


def edit_bits(edits: Sequence[str], names: Sequence[str]) -> int:
    """The edits of a request as bits beside those of ``uncovered_modes``, by their places among all names."""
    return sum(1 << _FIRST_EDIT + names.index(name) for name in edits)


def unserved_needs(modes: Sequence[Mode], name: str, edits: Sequence[str], names: Sequence[str]) -> int:
    """What a step does not serve of the needs of requests, as bits."""
    missing = [name for name in names if name not in edits and name not in _BY_CALL]
    # A step on probabilities has the name of no mode, so that it serves all modes.
    return sum(1 << i for i, mode in enumerate(modes) if mode.name == name) | edit_bits(missing, names)


def named_edits(needs: int, names: Sequence[str]) -> tuple[str, ...]:
    """The names of the edits among the bits that a batch needs, in their order."""
    bits = needs >> _FIRST_EDIT
    return tuple(name for i, name in enumerate(names) if bits >> i & 1) if bits else ()


def new_seed(generator: torch.Generator | None) -> int:
    """A seed in [0, 2**64) that a request gets for None: from the generator, without one from the operating system."""
    if generator is None:
        return int.from_bytes(os.urandom(8), "little")
    word = torch.empty((), dtype=torch.int64, device="cpu")
    return int(word.random_(-(2**63), None, generator=generator)) % 2**64  # None: up to 2**63 - 1, so all 64 bits


class RequestKind(NamedTuple):
    """What requests have in common that differ in seed and edits alone."""

    needs: int  # those of their modes alone, ``uncovered_modes``; what each needs for its edits comes on top
    entry: tuple[float | int, ...]  # their entry in the staged table behind the seed and what they need


class SlotState:
    """The requests by slot, with their table on the device."""

    def __init__(
        self,
        num_slots: int,
        modes: Sequence[Mode],
        device: torch.device,
        generator: torch.Generator | None = None,  # of seeds of None; else the operating system
        edits: EditSlots | None = None,  # None for one without a history
        most_rows: int = 0,  # of the inputs that lie in the mirror beside the table
    ) -> None:
        self._modes, self._generator, self._vocab_size = tuple(modes), generator, modes[0].vocab_size
        if edits is None:
            none = CustomEditSet((), self._vocab_size, device, num_slots)
            edits = EditSlots(num_slots, self._vocab_size, EditSizes(), 0, device, none)
        self._edits = edits
        self._request_kinds: dict[tuple[float, int, float, float], RequestKind] = {}
        neutral = SamplingParams(seed=0)
        kind = self._kind(neutral)
        table_size = max(num_slots, LEAST_ENTRIES)
        num_words = StagedTable.num_words(table_size) + 2 * HostMirror.aligned(2 * most_rows)
        self.staged = StagedTable(table_size, (0, kind.needs, *kind.entry), HostMirror(num_words, device))
        self._free = list(range(num_slots))
        self.params: list[SamplingParams | None] = [None] * num_slots
        self._needs = np.full(num_slots + 3, _FREE)  # slot s is entry s + 2; the ends stand for what is no slot
        self._needs[1] = 0  # padding, slot -1, needs nothing
        self._needs_of = {-1: 0}  # the same of padding and of held slots, for batches of few rows
        self._changed = np.zeros(num_slots + 1, np.int64)  # the epoch since which each slot is as it is; of padding 0
        # how many requests came and went; whether parameters of added ones wait for ``upload_before_step``
        self.epoch, self.is_pending = 0, False
        self._tables: dict[tuple[str, tuple[str, ...]], SlotTable] = {}  # saves 14 us an eager step; captures read them

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles of what holds requests: samplers, plans, drafts."""
        raise TypeError(
            "a Sampler must not be copied or pickled, nor its plans and drafts, as captured graphs read its memory; "
            "share it, or make another with the same arguments and add_request() what is held here"
        )

    @property
    def table(self) -> SlotTable:
        """The parameters by slot on the device, ``[S]``, up to date in a step and after ``upload``."""
        return self.staged.table

    def table_for(self, mode_name: str, edits: Sequence[str]) -> SlotTable:
        """The table for steps that sample as a mode and make these edits; to be asked for first outside of captures.

        What a captured step reads lives as long as this object.
        """
        key = mode_name, tuple(name for name in edits if name not in _BY_CALL)
        table = self._tables.get(key)
        if table is None:
            needs = unserved_needs(self._modes, *key, self._edits.custom.all_names)
            with torch.inference_mode(False):
                unserved = torch.full_like(self.table.unserved, needs)
            table = self._tables[key] = self.table._replace(unserved=unserved)
        return table

    @property
    def num_free(self) -> int:
        """Slots that no request holds."""
        return len(self._free)

    def upload_before_step(self) -> None:
        """Bring what the next step does not upload itself of added requests, on the current stream and without a wait.

        A replay uploads entries of the table with its slots; edits must always be there before.
        """
        if not self.staged.steps_are_replays:
            self.staged.mirror.upload()
        self._edits.upload()
        self.is_pending = False  # only now: where the device fails, a later call tries again

    def upload(self) -> None:
        """Bring the parameters of added requests to the device now, on the current stream and without a wait."""
        self.upload_before_step()
        self.staged.mirror.upload()

    def add(self, params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> int:
        """The slot of a new request: the lowest free one; steps read its entry in the table from the next one on."""
        if not self._free:
            raise RuntimeError(
                f"all {len(self.params)} slots are taken; remove_request() one, or make the Sampler with a larger "
                "max_num_requests"
            )
        edits = self._edits.checked(params, prompt, output)
        if params.seed is None:
            params = dataclasses.replace(params, seed=new_seed(self._generator))
        slot = heapq.heappop(self._free)
        try:
            kind, self.is_pending = self._kind(params), True
            needs = kind.needs
            if edits:
                needs |= edit_bits(edits, self._edits.custom.all_names)
            self.staged.write(slot, as_int64(params.seed or 0), needs, kind.entry)
            self._edits.add(slot, params, edits, prompt, output)
        except BaseException:
            heapq.heappush(self._free, slot)  # nobody else knows it
            raise
        self.params[slot] = params
        self._needs_of[slot] = needs
        self._note(slot, needs)
        return slot

    def _note(self, slot: int, needs: int) -> None:
        """A slot has changed hands."""
        self.epoch += 1
        self._needs[slot + 2], self._changed[slot] = needs, self.epoch

    def _kind(self, params: SamplingParams) -> RequestKind:
        """The kind of a request; kept, since the requests of an engine are of few kinds."""
        key = params.temperature, params.top_k, params.top_p, params.min_p
        found = self._request_kinds.get(key)
        if found is None:
            if len(self._request_kinds) >= _MOST_REQUEST_KINDS:
                self._request_kinds.clear()
            entry = *slot_values(params, self._vocab_size)[1:], processed_scale(params)
            found = self._request_kinds[key] = RequestKind(uncovered_modes(self._modes, params), entry)
        return found

    def remove(self, slot: int) -> None:
        """Free a slot."""
        self.request(slot)
        self.params[slot] = None
        del self._needs_of[slot]
        heapq.heappush(self._free, slot)
        self._note(slot, _FREE)

    def request(self, slot: int) -> SamplingParams:
        """The parameters of the request in a slot."""
        params = self.params[slot] if 0 <= slot < len(self.params) else None
        if params is None:
            raise ValueError(f"slot must come from add_request() and not be removed, got {slot}")
        return params

    def needs_of_batch(self, slots: Sequence[int], words: bytes) -> int:
        """The modes that do not cover a batch, as bits: bit i for mode i of the table; and its edits, ``named_edits``.

        Every mode covers padding, -1.
        """
        if len(slots) > FEW:
            needs = int(np.bitwise_or.reduce(self._needs.take(numbers_of(words) + 2, mode="clip")))
        else:
            try:
                kinds = {*itemgetter(-1, -1, *slots)(self._needs_of)}  # a tuple of two at least; padding needs 0
            except KeyError:
                kinds = {_FREE}
            needs = reduce(or_, kinds)
        if needs & _FREE:
            raise no_request(*next(pair for pair in enumerate(slots) if pair[1] not in self._needs_of))
        return needs

    def changed_since(self, epoch: int, slots: np.ndarray) -> np.ndarray:
        """Whether each slot ``[R]`` was taken or freed after an epoch, as bools; never for padding."""
        found: np.ndarray = self._changed[slots] > epoch
        return found
