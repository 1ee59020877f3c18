"""What goes from the host to the device: the parameters of all slots, and the numbers of a plan."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.batch import SlotTable
from compiled_sampler.engine.boundary.arguments import is_capturing
from compiled_sampler.logprobs import LogprobInputs, Logprobs
from graph_cache import HostMirror, part_of, tensor_of

LEAST_ENTRIES = 2
"""Entries of a table by slot, at least: stages are compiled for any number of several, and apart for a single one."""

_OF_REQUESTS = torch.int64, torch.int64  # seed and needs
_OF_KINDS = (torch.float32, torch.int32, torch.int64, torch.float64, torch.float32, torch.float32)
_DTYPES = (*_OF_REQUESTS, *_OF_KINDS)  # the last is of processed_scale
ARRAY_DTYPES = {dtype: torch.empty(0, dtype=dtype, device="cpu").numpy().dtype for dtype in _DTYPES}
_WORD_BYTES = 4
_LONGEST_WAIT = 10.0  # seconds
_SLAB_SIZE = 1 << 17  # 1 MiB: plans of 256 rows take a new one after 512 of them


class StagedTable:
    """A slot table whose entries are written on the host, in a mirror: the next step brings them to the device."""

    def __init__(self, num_slots: int, entry: Sequence[float | int], mirror: HostMirror) -> None:
        # ``steps_are_replays``: the last step that was chosen is one; a replay uploads what changed itself
        self.mirror, self.steps_are_replays = mirror, False
        self._columns: list[Any] = []
        columns, first = [], mirror.take(0)
        self._words = first, first + self.num_words(num_slots)
        with torch.inference_mode(False):  # a tensor made under inference mode could not be written outside of it
            for dtype, value in zip(_DTYPES, entry, strict=True):
                size = num_slots * dtype.itemsize // _WORD_BYTES
                start = mirror.take(size)
                column = mirror.here[start : start + size].view(ARRAY_DTYPES[dtype])
                column[:] = value
                self._columns.append(column.data)  # the same memory, whose entries are set in half the time
                columns.append(part_of(mirror.there, dtype, start, (num_slots,), (1,)))
            mirror.there.copy_(torch.from_numpy(mirror.here))  # whatever stream reads it first
            # ``processed_scale``, see ``LogprobInputs``, lies beside the table and comes with it
            seeds, needs, *filters, self.processed_scale = columns
            self.table = SlotTable(*(seeds, *filters, needs, torch.zeros_like(needs[:1])))

    @staticmethod
    def num_words(num_slots: int) -> int:
        """The words that it takes of a mirror."""
        return sum(HostMirror.aligned(num_slots * dtype.itemsize // _WORD_BYTES) for dtype in _DTYPES)

    def write(self, slot: int, seed: int, needs: int, rest: tuple[float | int, ...]) -> None:
        """Write an entry on the host, which the next step brings to the device, or ``mirror.upload`` before."""
        seeds, all_needs, *columns = self._columns
        self.mirror.note(*self._words)  # also where what follows is interrupted
        seeds[slot], all_needs[slot] = seed, needs
        for column, value in zip(columns, rest, strict=True):
            column[slot] = value


def room(*sizes: int) -> int:
    """Numbers of int64 that tensors of these sizes take of a place, each aligned: kernels clone what is not."""
    return sum(size + size % 2 for size in sizes)


class Place(NamedTuple):
    """Device memory that a plan was promised, for a capture that is the first to need its numbers."""

    reserve: DeviceReserve  # whose stream and pinned memory bring the numbers
    slab: Tensor  # int64, shared with other plans
    start: int  # the first number of the plan

    def filled(self, numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Numbers of the host, one after the other, on the device, without a node in the graph that is captured."""
        start, there = self.start, {}
        for name, here in numbers.items():
            there[name] = self.slab[start : start + len(here)]
            start += room(len(here))
            self.reserve.bring(here, there[name])
        return there


class DeviceReserve:
    """Device memory for plans that captures use first, inside which none can be allocated but that of their graph.

    A slab lives as long as a plan that was promised a part of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._slab = device, torch.empty(0, dtype=torch.int64, device=device)
        self._used = self._size = 0
        self._staging = torch.empty(2, 0, dtype=torch.int64, device="cpu")  # pinned: what goes there, and its echo
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def promise(self, size: int) -> Place:
        """A place for ``size`` numbers that no other plan has; not to be called inside a capture."""
        if self._used + size > self._size:
            count = max(size, _SLAB_SIZE)
            with torch.inference_mode(False), torch.cuda.stream(self._stream):
                self._slab = torch.empty(count, dtype=torch.int64, device=self._device)
                if self._staging.shape[1] < count:
                    self._staging = torch.empty(2, count, dtype=torch.int64, device="cpu").pin_memory()
            self._used, self._size = 0, len(self._slab)
        start, self._used = self._used, self._used + size
        return Place(self, self._slab, start)

    def bring(self, here: Tensor, there: Tensor) -> None:
        """Copy numbers of the host to the device beside a capture; they have arrived on return.

        A replay may run on any stream, so the host must wait. Inside a capture CUDA allows neither to wait for a stream
        or an event nor to ask for one: the host compares what comes back.
        """
        pinned, echo = self._staging[:, : len(here)]
        pinned.copy_(here)
        torch.bitwise_not(here, out=echo)
        with torch.cuda.stream(_not_captured(self._stream)):
            there.copy_(pinned, non_blocking=True)
            echo.copy_(there, non_blocking=True)
        end = time.monotonic() + _LONGEST_WAIT
        while not torch.equal(echo, here):
            if time.monotonic() > end:
                raise RuntimeError(
                    "the slots of a plan did not reach the device; read plan.slot_ids before the capture"
                )


def _not_captured(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream, or another: torch hands out the same ones in turns, so that it may be the one being captured."""
    while True:
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return stream
        stream = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]


class PlannedTensors:
    """The numbers of a plan: on the host, and once a step asks for tensors also on the device."""

    __slots__ = ("_device", "_place", "_there", "host")

    def __init__(self, numbers: dict[str, bytes], device: torch.device, place: Place | None) -> None:
        # ``numbers``: int64 words [N] by input of a step; ``place``: for a capture that asks first, None for a CPU
        self.host, self._device, self._place = numbers, device, place
        self._there: dict[str, Tensor] | None = None

    @property
    def there(self) -> dict[str, Tensor]:
        """The tensors on the device, uploaded by the first that asks: without a wait, or beside a capture."""
        if self._there is None:
            numbers = {name: tensor_of(words, torch.int64) for name, words in self.host.items()}
            if self._place is not None and is_capturing(self._device):
                self._there = self._place.filled(numbers)
            else:
                self._there = {name: _sent(each, self._device) for name, each in numbers.items()}
        return self._there

    def beside(self, numbers: dict[str, bytes], first: int) -> PlannedTensors:
        """Further numbers of the same plan, which begin at number ``first`` of its place."""
        place = self._place and self._place._replace(start=self._place.start + first)
        return PlannedTensors(numbers, self._device, place)

    @property
    def uploaded(self) -> tuple[Tensor, ...]:
        """The tensors on the device; none before the first use."""
        return tuple((self._there or {}).values())

    def holds(self, name: str, tensor: object) -> bool:
        """Whether a tensor is the one of a name on the device."""
        return self._there is not None and self._there.get(name) is tensor


def send_rows(slots: Sequence[int], rows: np.ndarray, table: Tensor) -> None:
    """Write rows of the host into a table ``[S, ...]`` at ascending slots, on the current stream and without a wait."""
    # A copy for each run of slots: requests that come at once have the lowest free ones, mostly in one run.
    here = _pinned(torch.from_numpy(rows), table.device)
    for _, run in itertools.groupby(enumerate(slots), lambda pair: pair[1] - pair[0]):
        places, of_run = zip(*run, strict=True)
        table[of_run[0] : of_run[-1] + 1].copy_(here[places[0] : places[-1] + 1], non_blocking=True)


def sent(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Numbers on the device, without a wait; on a CPU they share their memory."""
    return _sent(torch.from_numpy(numbers), device)


def _sent(here: Tensor, device: torch.device) -> Tensor:
    return _pinned(here, device).to(device, non_blocking=True)


def _pinned(here: Tensor, device: torch.device) -> Tensor:
    """Numbers from where a copy to the device needs no wait."""
    return here if device.type == "cpu" else here.pin_memory()


_MOST_KEPT = 64  # tensors of ids that no captured step reads


class LogprobTables:
    """The inputs of logprobs on the device."""

    def __init__(self, processed_scale: Tensor) -> None:
        # processed_scale, float32 [S], see LogprobInputs
        self.processed_scale, self._device = processed_scale, processed_scale.device
        self._captured: dict[Logprobs, Tensor] = {}
        self._others: dict[tuple[Logprobs, int], Tensor] = {}

    def keep(self, every: Iterable[Logprobs], rows: int) -> None:
        """Put the ids of ``every`` on the device for up to ``rows`` rows, where captured steps may read them."""
        for wanted in every:
            if wanted.token_ids is not None:
                self._captured[wanted] = self._sent(wanted.token_ids, rows)

    def inputs(self, wanted: Logprobs, rows: int) -> LogprobInputs:
        """What a step of so many rows of logits reads."""
        return LogprobInputs(wanted, self._given(wanted, rows), self.processed_scale)

    def _given(self, wanted: Logprobs, rows: int) -> Tensor | None:
        if wanted.token_ids is None:
            return None
        kept = self._captured.get(wanted)
        if kept is not None and rows <= len(kept):
            return kept[:rows]
        if is_capturing(self._device):  # filled in the graph: its memory is the graph's, and nothing is sent
            columns = (torch.full((rows,), each, device=self._device) for each in wanted.token_ids)
            return torch.stack([*columns], 1)
        if (wanted, rows) not in self._others:
            if len(self._others) >= _MOST_KEPT:
                self._others.clear()
            self._others[wanted, rows] = self._sent(wanted.token_ids, rows)
        return self._others[wanted, rows]

    def _sent(self, token_ids: tuple[int, ...], rows: int) -> Tensor:
        """Ids for each row, int64 ``[rows, n]``, without a wait for the device."""
        with torch.inference_mode(False):
            return sent(np.array(token_ids, np.int64), self._device).expand(rows, -1).contiguous()
