"""The schedule of a step: how a mode is computed for a number of rows on a device, resolved once on the host.

A schedule never changes a result. It says which passes run, how they cut rows into blocks, where kernels skip rows, and
how many rows a chunk may have; stages get these numbers as static arguments and never test where their tensors are. The
numbers are measured, those for Triton on an H200, those of scratch by ``python -m tools.bench --memory``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from compiled_sampler.core.stage import Other, Result, Run
from compiled_sampler.exact.triton import ENTRY_BYTES, launch_class, list_stride, part_tiles
from compiled_sampler.modes import Mode
from compiled_sampler.passes.candidates import FAN_OUT, MOST_CHOSEN, STORED_BLOCK

CHUNK_BYTES = 2**29
"""Scratch of a chunk of fused stages: 2,314 rows of 151,936 tokens in the mode ``full``: no measured cell has more."""
EAGER_CHUNK_BYTES = 2**27
"""Scratch of a chunk in eager torch, where smaller chunks are no slower."""

EDITED_BYTES = 2**28
"""An edited copy of a chunk's logits."""

ALIGNED_ROWS = 16
"""A chunk begins at a multiple, so at an address as aligned as the first row's, whatever the stride."""

_ALIGNED_REQUESTS = 2  # numbers of 8 bytes, which are cloned where they do not begin at a multiple of 16 bytes
_EAGER_TOKEN = 66  # most bytes a token that a stage holds in eager torch: measured, the last race of a verification
_EAGER_BLOCKS = 512, 1024  # tokens of the longest blocks that eager torch pads a row to: of shorter rows, of others
_CANDIDATE_BYTES = 64 * 64  # of a race between candidates in eager torch
_MOST_TOKENS = 2**31 - 1  # of a chunk, so that kernels index it with 32 bits
_LEAST_BLOCK, _BLOCK_BYTES = 256, 12  # of a pass that cuts rows into blocks: a key, nan_bits and a token id each
_STORED_BYTES = 8  # a key and nan_bits
_LEVEL_BYTES = 3 * 8 * 576  # packed keys of a level of narrowing on a GPU, twice, and where they are placed
_SELECTED_BYTES = 24  # a stored block on the CPU: its packed key, in torch and in numpy
_ROW_BYTES = 512  # parameters, thresholds, winners of parts


def row_bytes(mode: Mode, *, triton: bool, fused: bool, edited: bool = False) -> int:
    """Bytes of scratch a row of a mode, at most, beside its logits and results."""
    # fused: whether stages are compiled, so that what is inside of one is never written to memory; not on the CPU where
    # a search puts whole rows in order by numpy.
    size = mode.vocab_size
    least = STORED_BLOCK if edited and triton and not mode.draws else _LEAST_BLOCK  # a copy tells its maxima
    blocks = -(-size // STORED_BLOCK) * _STORED_BYTES if mode.capacity else -(-size // least) * _BLOCK_BYTES
    narrowing = 0
    if mode.capacity:
        narrowing = _LEVEL_BYTES if triton else -(-size // STORED_BLOCK) * _SELECTED_BYTES
    lists = ENTRY_BYTES * list_stride(size) if mode.searches and triton else 0
    tokens = 0 if fused and (triton or not mode.searches) else _EAGER_TOKEN * _padded(size) + _CANDIDATE_BYTES
    return blocks + narrowing + lists + tokens + (4 * size if edited else 0) + _ROW_BYTES


def _padded(size: int) -> int:
    """Tokens of a row after it is padded to blocks."""
    block = _EAGER_BLOCKS[size >= _EAGER_BLOCKS[1]]
    return -(-size // block) * block


def chunk_rows(mode: Mode, *, triton: bool, fused: bool, edited: bool = False) -> int:
    """Most rows of a chunk: as many as its scratch has room for, and one at least; arguments as ``row_bytes``."""
    budget = CHUNK_BYTES if fused else EAGER_CHUNK_BYTES
    row = row_bytes(mode, triton=triton, fused=fused, edited=edited)
    copies = _edited_rows(mode.vocab_size) if edited else _MOST_TOKENS
    return max(min(budget // row, _MOST_TOKENS // mode.vocab_size, copies), 1)


def eager_rows(*, row_bytes: int = 0, tokens: int = 0) -> int:
    """Most rows of a chunk of a stage that holds so much of a row in eager torch, one at least."""
    return max(EAGER_CHUNK_BYTES // max(row_bytes + _EAGER_TOKEN * _padded(tokens), 1), 1)


def chunk_ends(num_rows: int, most: int, unit: int = ALIGNED_ROWS) -> list[int]:
    """Where chunks of at most ``most`` rows end: of about as many rows each, so that one kernel serves them all."""
    # A chunk begins at a multiple of unit, if it has room for so many.
    unit = unit if most >= unit else 1
    units = -(-num_rows // unit)
    count = -(-units // (most // unit))
    return [min(units * number // count * unit, num_rows) for number in range(1, count + 1)]


def request_ends(mode: Mode, requests: int, rows: int, times: int) -> list[int]:
    """Where chunks of the requests of a verification end, whose edits copy the rows of a chunk at once."""
    # A chunk has so many requests that an edited copy has room for all rows that they may have, one at least. There is
    # one chunk where it has room for the rows of all, and in modes that edit row by row, or nothing.
    most = _edited_rows(mode.vocab_size)
    if mode.matches_drafts or mode.from_probabilities or rows <= most:
        return [requests]
    return chunk_ends(requests, max(most // times, 1), _ALIGNED_REQUESTS)


def _edited_rows(vocab_size: int) -> int:
    return max(EDITED_BYTES // (4 * vocab_size), 1)


SMALL_ROWS, LARGE_ROWS = 32, 128
"""Row counts that Triton kernels are shaped and tuned for, besides a single row: for 2 to 32 rows, and for more."""

_RACE_BLOCKS = {1: 256, SMALL_ROWS: 512, LARGE_ROWS: 512}  # tokens per block of a race, by class of row counts
_MASS_BLOCKS = {1: 256, SMALL_ROWS: 256, LARGE_ROWS: 512}  # of passes that compute much and keep one result a block
_ORDER_BLOCKS = {1: 256, SMALL_ROWS: 1024, LARGE_ROWS: 1024}  # of passes that compute little per token
_FINAL_BLOCK = 256  # of the race over a verification's final rows: with 512 a thread needs twice the registers
_SHORT_RACE_BLOCK = 256  # of a race over short rows: blocks of 512 would be too few to occupy a GPU
_CPU_RACE_BLOCK = 1024  # of a race in C++, where ending a block costs more than padding the row
_SHORT_ROW = 2**16  # a row of at most this many tokens is short
_SLICES, _ORDER_SLICE, _RACE_SLICE = 8, 16, 128  # most slices of a block; fewest tokens of a slice, by pass

_RANKED_ROWS = 16  # up to this many rows a level ranks its keys by counting; for more rows they are chosen and sorted
_MANY_ROWS = 256  # from this many short rows on, a level of narrowing is one kernel in all modes
_MOST_RANKED = 512  # most keys of a level of narrowing in Triton: ranking costs n * n comparisons per row
_MOST_SCORED = 2**23  # up to this many logits, a race of more than SMALL_ROWS rows scores each token
_MOST_READ_TWICE = 2**21  # the same with min_p and more than _RANKED_ROWS rows: bounds take one pass instead of two
_MOST_COMPARED = 1024  # up to this many requests, each row is compared with all: work of R * N, but no dependent loads


class Pass(NamedTuple):
    """How a pass cuts rows into blocks and reduces each block."""

    vocab_size: int
    block: int
    """Tokens per block."""
    slices: int
    """Parts of a block; each thread reduces its elements of all slices without shuffles."""
    by_bits: bool
    """``Schedule.by_triton``: blocks are reduced by bits of floats; else by keys, which no denormal mode changes."""

    @property
    def blocks(self) -> dict[str, int]:
        """The static arguments of a stage that cuts rows into blocks."""
        return {"vocab_size": self.vocab_size, "block": self.block}

    @property
    def blocks_by_bits(self) -> dict[str, int]:
        """Those of a stage that also reduces floats in each block, as integers or not."""
        return {**self.blocks, "by_bits": self.by_bits}

    @property
    def reduction(self) -> dict[str, int]:
        """The static arguments of a stage that keeps the largest key of each block."""
        return {**self.blocks, "slices": self.slices, "by_bits": self.by_bits}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a mode is computed for a number of rows on a device."""

    mode: Mode
    order: Pass
    """For passes that keep the largest logit of a block, and for the block weights of a law."""
    mass: Pass
    """For passes that compute the mass of each block or its residual sum."""
    race: Pass
    """For the race over whole rows."""
    stored: Pass
    """For the first pass in modes with candidates, whose maxima narrowing starts from."""
    copied: Pass
    """For the largest logit of such a block where a pass that copies edited logits finds it, and stores it."""
    final: Pass
    """For the race over the final rows of a verification."""
    by_triton: bool
    """Whether kernels are Triton's: they compare floats and their bits, hand-written ones skip rows that need no
    search, and a pass returns the best token of each block, so that no kernel reads the best block again. C++ compares
    integer keys, as its float operations may take denormals for zeros, and the host waits for the flags of rows that
    need a search. Stages get what follows from it as static arguments: ``by_bits``, ``names``, ``per_block``.
    """
    races_by_bounds: bool
    """Whether a race bounds all scores, then computes those that may win: fewer instructions, three kernels more."""
    reads_masks: bool
    """Whether passes read masks beside the logits; otherwise they read a copy that has them."""
    copies_with_maxima: bool
    """Whether a pass that copies edited logits returns their block maxima too, by ``copied``, for later stages to read.

    In greedy modes and those with candidates, where blocks need no padding: with it, the copy would be written and then
    read again.
    """
    levels: tuple[int, ...]
    """Tokens a block of the successive levels of narrowing, descending, ending in 1; none without candidates."""
    picks_by: Literal["select", "rank", "choose"]
    """How the largest keys of a level are found: numpy's partition without Triton, ranking by counting for few rows, or
    choosing bit by bit.
    """
    fuses_levels: bool
    """Whether the blocks of a level are found and chosen in one kernel."""
    launches: tuple[int, ...]
    """What compiled forms at hand-written races depend on, so that a warm-up runs each: their launch class, and the
    tiles of a part of a row where rows are weighed too and where not. Empty without such races.
    """
    row_max_kernel: bool
    """Whether a separate kernel finds each row's largest logit before rows without top-k and top-p are weighed; without
    one Triton's weighing pass finds it again in each block, see ``maxima.largest_in_each``.
    """
    chunk_rows: int
    """Most rows that a chain of compiled stages takes at once; more go in chunks, one after the other."""
    eager_chunk_rows: int
    """The same in eager torch, which writes to memory what kernels keep in registers."""
    searches_requests: bool
    """Whether rows of a verification find their requests by scans and binary searches instead of comparing with all."""

    @property
    def orders_candidates(self) -> bool:
        """Whether narrowing returns candidates in descending order; otherwise they are sorted where order counts."""
        return self.picks_by != "choose"


class StepRun(Run):
    """How a step runs its stages: as another run does, by a schedule."""

    def __init__(self, run: Run, schedule: Schedule) -> None:
        super().__init__(run, fuses=run.fuses)
        self._run, self.schedule, self.mode = run, schedule, schedule.mode
        self.vocab = {"vocab_size": schedule.mode.vocab_size}
        """The static argument of stages that read rows, but not in blocks."""

    @property
    def lists(self) -> bool:
        """As the other run."""
        return self._run.lists

    def any_row(self, flags: Tensor) -> bool:
        """As the other run."""
        return self._run.any_row(flags)

    def overlap(
        self, device: torch.device, first: Callable[[], Result], second: Callable[[], Other]
    ) -> tuple[Result, Other]:
        """As the other run."""
        return self._run.overlap(device, first, second)

    def steady_rows(self, rows: Tensor) -> Tensor:
        """As the other run."""
        return self._run.steady_rows(rows)


def is_gpu(device: torch.device) -> bool:
    """Whether kernels for the device are Triton's rather than C++: the only test of a device in the pipeline."""
    return device.type == "cuda"


def row_class(rows: int, device: torch.device) -> int:
    """The row count whose kernels serve ``rows`` rows: 1, ``SMALL_ROWS`` or ``LARGE_ROWS``; in C++ 1 or the last."""
    return _row_class(rows, is_gpu(device))


def schedule_for(
    mode: Mode, rows: int, device: torch.device, *, is_edited: bool = False, has_masks: bool = False
) -> Schedule:
    """The schedule of a mode for a batch, cached."""
    # has_masks: whether the edits include masks that the passes of a draw may read, so that they need no copy.
    return _resolved(mode, rows, is_gpu(device), torch.version.hip is None, is_edited, has_masks)


def warmup_batches(
    mode: Mode,
    sizes: Iterable[int],
    times: int,
    device: torch.device,
    *,
    also: Mode | None = None,
    is_edited: bool = False,
) -> list[tuple[int, int]]:
    """The batches to warm up with, (entries, rows) each, which together use the kernels of all batches of a mode."""
    # There is one batch for each pair of classes, where possible the one that its kernels are tuned for, because the
    # first call of a class decides the tuning.
    # sizes: entries of the batches that will come; times: most rows of an entry; also: another mode whose kernels the
    # step uses.
    modes = (mode,) if also is None else (mode, also)
    typical = sorted({row_class(size, device) for size in (*sizes, 2)})
    batches: dict[Any, tuple[int, int]] = {}
    for size in (*typical, *sorted(sizes)):
        for rows in (size * times, size):
            kernels = tuple(
                (row_class(n, device), *(schedule_for(step_mode, n, device) for step_mode in modes))
                for n in (size, rows)
            )
            chunks = _request_chunks(mode, size, rows, times, device) if is_edited else None
            batches.setdefault((kernels, chunks), (size, rows))
    return list(batches.values())


def _request_chunks(mode: Mode, size: int, rows: int, times: int, device: torch.device) -> frozenset[int] | None:
    """The classes of the chunks of a verification by their requests; None where it is not cut."""
    ends = request_ends(mode, size, rows, times) if mode.rule else [size]
    if len(ends) == 1:
        return None
    return frozenset(row_class(end - start, device) for start, end in zip([0, *ends], ends, strict=False))


@functools.lru_cache(maxsize=4096)
def _resolved(mode: Mode, rows: int, triton: bool, is_cuda: bool, is_edited: bool, has_masks: bool) -> Schedule:
    size, size_class = mode.vocab_size, _row_class(rows, triton)
    narrows, few = mode.capacity > 0, triton and rows <= _RANKED_ROWS
    by_bounds = triton and is_cuda and not narrows and not mode.searches and _are_bounded(rows, mode)
    stored = Pass(size, STORED_BLOCK, _slices(STORED_BLOCK, _ORDER_SLICE) if triton else 1, triton)
    return Schedule(
        mode=mode,
        order=_pass(size, _ORDER_BLOCKS[size_class], _ORDER_SLICE, triton),
        mass=_pass(size, _MASS_BLOCKS[size_class], _ORDER_SLICE, triton),
        race=_race_pass(size, size_class, triton),
        stored=stored,
        copied=stored._replace(slices=1),
        final=_pass(size, _FINAL_BLOCK, _ORDER_SLICE, triton),
        by_triton=triton,
        # the bound of a NaN must be above all others: CUDA's arithmetic gives a NaN a positive sign
        races_by_bounds=by_bounds,
        reads_masks=has_masks and triton,  # C++ copies faster than it loads single bits
        # a greedy row alone is faster by two passes, 5.2 us instead of 5.4
        copies_with_maxima=triton and size % STORED_BLOCK == 0 and (narrows or (not mode.draws and rows > 1)),
        levels=_levels(size, triton) if narrows else (),
        picks_by="rank" if few and narrows else "choose" if triton else "select",
        fuses_levels=triton and narrows and not few and _are_fused(rows, mode),
        launches=_launches(size, rows) if triton and (mode.searches or (by_bounds and mode.draws)) else (),
        row_max_kernel=triton and size_class == LARGE_ROWS,
        chunk_rows=chunk_rows(mode, triton=triton, fused=True, edited=is_edited),
        eager_chunk_rows=chunk_rows(mode, triton=triton, fused=False, edited=is_edited),
        searches_requests=bool(mode.rule) and rows > _MOST_COMPARED,
    )


def _launches(vocab_size: int, rows: int) -> tuple[int, ...]:
    return *launch_class(rows), *(part_tiles(vocab_size, rows, weighs=weighs) for weighs in (True, False))


def _row_class(rows: int, triton: bool) -> int:
    if rows == 1:
        return 1
    return SMALL_ROWS if triton and rows <= SMALL_ROWS else LARGE_ROWS


def _pass(vocab_size: int, block: int, slice_size: int, triton: bool) -> Pass:
    """A pass in blocks of ``block`` tokens; in C++, where padding is a copy, in smaller ones if they divide the row."""
    divisor = math.gcd(vocab_size, block)
    if triton:
        return Pass(vocab_size, block, _slices(block, slice_size), True)
    return Pass(vocab_size, divisor if divisor >= STORED_BLOCK else block, 1, False)


def _race_pass(vocab_size: int, size_class: int, triton: bool) -> Pass:
    if triton:
        block = _SHORT_RACE_BLOCK if vocab_size <= _SHORT_ROW else _RACE_BLOCKS[size_class]
        return _pass(vocab_size, block, _RACE_SLICE, triton)
    if vocab_size >= _CPU_RACE_BLOCK:
        return Pass(vocab_size, _CPU_RACE_BLOCK, 1, False)
    return _pass(vocab_size, _RACE_BLOCKS[size_class], _RACE_SLICE, triton)


def _slices(block: int, slice_size: int) -> int:
    return math.gcd(min(_SLICES, max(block // slice_size, 1)), block)


def _are_bounded(rows: int, mode: Mode) -> bool:
    """Whether a race by bounds is faster: for many rows with many logits."""
    fewest, most = (_RANKED_ROWS, _MOST_READ_TWICE) if mode.filters_min_p else (SMALL_ROWS, _MOST_SCORED)
    return rows > fewest and rows * mode.vocab_size > most


def _are_fused(rows: int, mode: Mode) -> bool:
    """Whether a level of narrowing is faster as one kernel."""
    # It is slower where a pass over rows overlaps it: p .9 of 128 rows takes 76 us instead of 71, of 256 rows 133
    # instead of 119. It is faster even there for many short rows: 512 rows of 32,768 tokens take 70 us instead of 79.
    beside_a_pass = mode.searches or mode.base_is_row
    fits = mode.capacity * FAN_OUT <= MOST_CHOSEN
    return fits and (not beside_a_pass or (rows >= _MANY_ROWS and mode.vocab_size <= _SHORT_ROW))


def _levels(vocab_size: int, triton: bool) -> tuple[int, ...]:
    """Block sizes of the levels of narrowing, at most ``_MOST_RANKED`` blocks a level in Triton, descending to 1."""
    # C++ selects among thousands of keys as fast as it makes a level, so there the blocks of the first pass come first
    # and tokens next: 0.3 ms instead of 0.5 for 8 rows of 151,936.
    if vocab_size > _MOST_RANKED and not triton:
        return STORED_BLOCK, 1
    sizes = [1]
    while -(-vocab_size // sizes[-1]) > _MOST_RANKED:
        sizes.append(sizes[-1] * FAN_OUT)
    return tuple(reversed(sizes))
