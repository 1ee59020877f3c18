"""Slots: which request holds which, the modes that cover them, and their parameters as numbers."""

from __future__ import annotations

import dataclasses
import heapq
import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.batch import SlotTable
from compiled_sampler.core.parameter_log2 import LOG2_E, log2_of_number
from compiled_sampler.edit_tables import EDITS
from compiled_sampler.engine.edit_slots import EditSlots
from compiled_sampler.engine.uploads import StagedTable
from compiled_sampler.modes import Mode, uncovered
from compiled_sampler.params import SamplingParams

_MOST_KINDS = 4096  # of requests whose modes are kept
_FREE = 1 << 62  # the bit of a free slot among those of the modes that do not cover a request
_FIRST_EDIT = 24  # the bit of the first edit among them, of at most 38 with those of the user


def slot_values(params: SamplingParams, vocab_size: int) -> tuple[float | int, ...]:
    """The entry of ``SlotTable`` for one request, as Python numbers; of a greedy request without filters and noise.

    Args:
        params: of the request, with a seed.
        vocab_size: V.
    """
    seed = ((params.seed or 0) + 2**63) % 2**64 - 2**63
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


def processed_scale(params: SamplingParams) -> float:
    """``log2(e) / temperature`` of a request, at temperature 1 for temperature 0; greedy by ``top_k`` 1 or not."""
    return LOG2_E / (params.temperature or 1.0)


def slot_array(slots: Sequence[int]) -> np.ndarray:
    """The slots of a batch as int64 ``[R]``.

    Raises:
        ValueError: a number beyond 64 bits, which is no slot.
    """
    try:
        return np.array(slots, np.int64)
    except OverflowError:
        raise no_request(*max(enumerate(slots), key=lambda pair: abs(pair[1]))) from None


def no_request(row: int, slot: int) -> ValueError:
    """The error for a row of a batch whose slot holds no request."""
    return ValueError(f"row {row}: slot must come from add_request() and not be removed, got {slot}; -1 is padding")


def uncovered_modes(modes: Sequence[Mode], params: SamplingParams) -> int:
    """The modes that do not cover a request, as bits: bit i for ``modes[i]``."""
    return sum(1 << i for i, mode in enumerate(modes) if uncovered(mode, params))


def edit_bits(edits: Sequence[str], names: Sequence[str] = EDITS) -> int:
    """The edits of a request as bits beside those of ``uncovered_modes``, by their places among all names."""
    return sum(1 << _FIRST_EDIT + names.index(name) for name in edits)


def named_edits(needs: int, names: Sequence[str] = EDITS) -> tuple[str, ...]:
    """The names of the edits among the bits that a batch needs, in their order."""
    bits = needs >> _FIRST_EDIT
    return tuple(name for i, name in enumerate(names) if bits >> i & 1) if bits else ()


def new_seed(generator: torch.Generator | None) -> int:
    """A seed in [0, 2**64) that a request gets for None: from the generator, without one from the operating system."""
    if generator is None:
        return int.from_bytes(os.urandom(8), "little")
    word = torch.empty((), dtype=torch.int64, device="cpu")
    return int(word.random_(-(2**63), None, generator=generator)) % 2**64  # None: up to 2**63 - 1, so all 64 bits


class SlotState:
    """The requests by slot, with their table on the device.

    Args:
        num_slots: S.
        modes: the mode table; which of its modes cover a request is decided once, when the request is added.
        device: of the slot table.
        generator: that seeds of None are drawn from; None for the operating system.
        edits: of the requests; None for a state whose requests have none.
    """

    def __init__(
        self,
        num_slots: int,
        modes: Sequence[Mode],
        device: torch.device,
        generator: torch.Generator | None = None,
        edits: EditSlots | None = None,
    ) -> None:
        """Create free slots, whose entries in the table filter nothing."""
        self._modes, self._generator, self._edits = tuple(modes), generator, edits
        self._vocab_size = modes[0].vocab_size
        self._table = StagedTable(num_slots, self._entry(SamplingParams(seed=0)), device)
        self._free = list(range(num_slots))
        self.params: list[SamplingParams | None] = [None] * num_slots
        self._uncovered = np.full(num_slots + 1, _FREE)
        self._uncovered[0] = 0  # padding, slot -1, needs nothing; slot s is entry s + 1
        self._kinds: dict[tuple[float, int, float, float], int] = {}
        self._generations = np.zeros(num_slots + 1, np.int64)
        self.epoch = 0

    @property
    def table(self) -> SlotTable:
        """The parameters by slot on the device, ``[S]``, up to date after ``upload``."""
        return self._table.table

    @property
    def processed_scale(self) -> Tensor:
        """float32 ``[S]`` on the device, see ``LogprobInputs``; up to date after ``upload``."""
        return self._table.processed_scale

    @property
    def is_pending(self) -> bool:
        """Whether parameters of added requests are yet to be uploaded."""
        return self._table.is_pending or (self._edits is not None and self._edits.is_pending)

    @property
    def num_free(self) -> int:
        """Slots that no request holds."""
        return len(self._free)

    def upload(self) -> None:
        """Bring the parameters of added requests to the device, on the current stream and without a wait."""
        self._table.upload()
        if self._edits is not None:
            self._edits.upload()

    def add(self, params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> int:
        """The slot of a new request: the lowest free one; ``upload`` brings its table entry to the device.

        Args:
            params: of the request.
            prompt: token ids of its prompt, for edits.
            output: token ids that were drawn before.

        Raises:
            RuntimeError: no slot is free.
        """
        if not self._free:
            raise RuntimeError(
                f"all {len(self.params)} slots are taken; remove_request() one, or make the Sampler with a larger "
                "max_num_requests"
            )
        if self._edits is not None:
            self._edits.check(params, prompt, output)
        if params.seed is None:
            params = dataclasses.replace(params, seed=new_seed(self._generator))
        slot = heapq.heappop(self._free)
        self._table.write(slot, self._entry(params))
        self.params[slot] = params
        self._uncovered[slot + 1] = self._needs(params)
        if self._edits is not None:
            added = self._edits.add(slot, params, prompt, output)
            self._uncovered[slot + 1] |= edit_bits(added, self._edits.custom.all_names)
        self._generations[slot] += 1
        self.epoch += 1
        return slot

    def _entry(self, params: SamplingParams) -> tuple[float | int, ...]:
        return (*slot_values(params, self._vocab_size), processed_scale(params))

    def _needs(self, params: SamplingParams) -> int:
        """The modes that do not cover a request, as bits; kept, since the requests of an engine are of few kinds."""
        kind = params.temperature, params.top_k, params.top_p, params.min_p
        if kind not in self._kinds:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            self._kinds[kind] = uncovered_modes(self._modes, params)
        return self._kinds[kind]

    def remove(self, slot: int) -> None:
        """Free a slot.

        Raises:
            ValueError: no request holds the slot.
        """
        self.request(slot)
        self.params[slot] = None
        heapq.heappush(self._free, slot)
        self._uncovered[slot + 1] = _FREE
        self._generations[slot] += 1
        self.epoch += 1

    def request(self, slot: int) -> SamplingParams:
        """The parameters of the request in a slot.

        Raises:
            ValueError: no request holds it.
        """
        params = self.params[slot] if 0 <= slot < len(self.params) else None
        if params is None:
            raise ValueError(f"slot must come from add_request() and not be removed, got {slot}")
        return params

    def uncovered(self, slots: np.ndarray) -> int:
        """The modes that do not cover a batch, as bits: bit i for mode i of the table; and its edits, ``named_edits``.

        Every mode covers padding, -1.

        Args:
            slots: int64 ``[R]``.

        Raises:
            ValueError: a row names a slot without a request.
        """
        try:
            index = slots + 1
            has_negative = np.bitwise_or.reduce(index, initial=0) < 0
            needs = _FREE if has_negative else int(np.bitwise_or.reduce(self._uncovered[index], initial=0))
        except IndexError:
            needs = _FREE
        if needs & _FREE:
            count = len(self.params)
            free = ((i, s) for i, s in enumerate(slots) if not -1 <= s < count or self._uncovered[s + 1] == _FREE)
            raise no_request(*next(free))
        return needs

    def generations(self, slots: np.ndarray) -> np.ndarray:
        """How often each slot was taken or freed, which identifies the request that holds it; 0 for padding."""
        found: np.ndarray = self._generations[slots]
        return found
