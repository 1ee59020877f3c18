"""Slots: the parameters of each request, on the host and in a table on the device."""

from __future__ import annotations

import dataclasses
import heapq
import math
import os
from collections.abc import Sequence

import torch

from compiled_sampler.batch import SlotTable
from compiled_sampler.modes import Mode, uncovered
from compiled_sampler.params import SamplingParams

_DTYPES = SlotTable(torch.int64, torch.float32, torch.int32, torch.int64, torch.float64, torch.float32)  # type: ignore[arg-type]


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
        math.log2(math.e) / params.temperature,
        -1,
        params.top_k if 0 < params.top_k < vocab_size else vocab_size,
        params.top_p,
        math.log2(params.min_p) if params.min_p > 0.0 else -math.inf,
    )


class SlotState:
    """The requests by slot, with their table on the device.

    Args:
        num_slots: S.
        modes: the mode table; which of its modes cover a request is decided once, when the request is added.
        device: of the slot table.
    """

    def __init__(self, num_slots: int, modes: Sequence[Mode], device: torch.device) -> None:
        """Create free slots, whose entries in the table filter nothing."""
        self._modes = tuple(modes)
        self._vocab_size = modes[0].vocab_size
        neutral = slot_values(SamplingParams(seed=0), self._vocab_size)
        with torch.inference_mode(False):  # a tensor made under inference mode could not be written outside of it
            self.table = SlotTable(
                *(
                    torch.full((num_slots,), value, dtype=dtype, device=device)  # type: ignore[call-overload]
                    for value, dtype in zip(neutral, _DTYPES, strict=True)
                )
            )
        self._free = list(range(num_slots))
        self.params: list[SamplingParams | None] = [None] * num_slots
        self._uncovered = [0] * num_slots
        self._generations = [0] * num_slots
        self.epoch = 0

    def add(self, params: SamplingParams) -> int:
        """The slot of a new request: the lowest free one, whose table entry is written.

        Raises:
            RuntimeError: no slot is free.
        """
        if not self._free:
            raise RuntimeError(
                f"all {len(self.params)} slots are taken; remove_request() one, or make the Sampler with a larger "
                "max_num_requests"
            )
        if params.seed is None:
            params = dataclasses.replace(params, seed=int.from_bytes(os.urandom(8), "little"))
        for column, value in zip(self.table, slot_values(params, self._vocab_size), strict=True):
            column[self._free[0]].fill_(value)  # before the host's records: if a device fails, the slot stays free
        slot = heapq.heappop(self._free)
        self.params[slot] = params
        self._uncovered[slot] = sum(1 << i for i, mode in enumerate(self._modes) if uncovered(mode, params))
        self._generations[slot] += 1
        self.epoch += 1
        return slot

    def remove(self, slot: int) -> None:
        """Free a slot.

        Raises:
            ValueError: no request holds the slot.
        """
        self.request(slot)
        self.params[slot] = None
        heapq.heappush(self._free, slot)
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

    def uncovered(self, slots: Sequence[int]) -> int:
        """The modes that do not cover a batch, as bits: bit i for mode i of the table. Every mode covers padding, -1.

        Raises:
            ValueError: a row names a slot without a request.
        """
        needs = 0
        for row, slot in enumerate(slots):
            if slot >= 0 and slot < len(self.params) and self.params[slot] is not None:
                needs |= self._uncovered[slot]
            elif slot != -1:
                raise ValueError(
                    f"row {row}: slot must come from add_request() and not be removed, got {slot}; -1 is padding"
                )
        return needs

    def generations(self, slots: Sequence[int]) -> tuple[int, ...]:
        """How often each slot was taken or freed, which identifies the request that holds it; 0 for padding."""
        return tuple(0 if slot == -1 else self._generations[slot] for slot in slots)
