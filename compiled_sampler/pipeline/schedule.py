"""The schedule of a step: how a mode is computed for so many rows on a device, resolved once on the host.

Nothing here changes a result. A schedule says which passes run, how they cut rows into blocks, and where kernels skip
rows; stages get what they need of it as static arguments, and none asks where its tensors are. The numbers are
measured, those for Triton on an H200.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from compiled_sampler.modes import Mode
from compiled_sampler.passes.narrowing import FAN_OUT, STORED_BLOCK
from compiled_sampler.passes.ranking import MOST_CHOSEN

SMALL_ROWS, LARGE_ROWS = 32, 128
"""Rows that Triton kernels are shaped and tuned for, besides the single row: for 2 to 32 rows, and for more."""

_RACE_BLOCKS = {1: 256, SMALL_ROWS: 512, LARGE_ROWS: 512}  # tokens a block of a race, by class of row counts
_MASS_BLOCKS = {1: 256, SMALL_ROWS: 256, LARGE_ROWS: 512}  # of other passes that compute much and keep one result
_ORDER_BLOCKS = {1: 256, SMALL_ROWS: 1024, LARGE_ROWS: 1024}  # of passes that compute little
_FINAL_BLOCK = 256  # of the race over final rows of a verification: with 512 a thread needs twice the registers
_SHORT_RACE_BLOCK = 256  # of a race over short rows, which blocks of 512 would not spread over a GPU
_CPU_RACE_BLOCK = 1024  # of a race in C++, where the end of a block costs more than padding the row
_SHORT_ROW = 2**16  # tokens up to which a row is short
_SLICES, _ORDER_SLICE, _RACE_SLICE = 8, 16, 128  # slices of a block at most; tokens of a slice at least, by pass

_FEW_ROWS = 16  # up to which a level's keys are ranked by counting; keys of more rows are chosen and sorted
_MANY_ROWS = 256  # from which a level of narrowing short rows is one kernel in all modes
_MOST_RANKED = 512  # keys of a level of narrowing in Triton: ranking costs n * n compares a row
_MOST_SCORED = 2**23  # logits up to which a race of more than SMALL_ROWS rows scores each token
_MOST_READ_TWICE = 2**21  # the same with min_p, for more than _FEW_ROWS rows: by bounds, one pass instead of two

Edit = Callable[..., Tensor]
"""A stage ``(logits, entries, *, vocab_size) -> logits`` of the same shape, run before every other pass."""


class Pass(NamedTuple):
    """How a pass cuts rows into blocks and reduces each."""

    vocab_size: int
    block: int
    """Tokens a block."""
    slices: int
    """Parts of a block that a thread reduces alone."""
    by_bits: bool
    """Compare floats as integers."""

    @property
    def blocks(self) -> dict[str, int]:
        """The static arguments of a stage that cuts rows into blocks."""
        return {"vocab_size": self.vocab_size, "block": self.block}

    @property
    def reduction(self) -> dict[str, int]:
        """Those of a stage that keeps the largest key of a block."""
        return {**self.blocks, "slices": self.slices, "by_bits": self.by_bits}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a mode is computed for so many rows on a device."""

    mode: Mode
    """What is computed."""
    edits: tuple[Edit, ...]
    """Stages that edit the logits before every other pass, in their order; the library has none yet."""
    order: Pass
    """Of passes that keep the largest logit of a block."""
    mass: Pass
    """Of passes that compute a weight for every token."""
    race: Pass
    """Of the race over whole rows."""
    stored: Pass
    """Of the first pass in modes with candidates, which narrowing begins with."""
    final: Pass
    """Of the race over the final rows of a verification."""
    names_tokens: bool
    """Whether a pass returns the best token of each block, which spares a second look at the best block."""
    races_by_bounds: bool
    """Whether a race bounds all scores and computes those that may win: fewer instructions, three kernels more."""
    levels: tuple[int, ...]
    """Tokens a block of the successive levels of narrowing, descending, ending in 1; none without candidates."""
    picks_by: Literal["select", "rank", "choose"]
    """How the largest keys of a level are found: numpy's partition, ranking by counting, or choosing bit by bit."""
    fuses_levels: bool
    """Whether the blocks of a level are found and chosen in one kernel."""
    skips_rows: bool
    """Whether hand-written kernels skip the rows that need no search; else the host waits to learn of them."""
    row_max_kernel: bool
    """Whether a kernel of its own finds each row's largest logit before rows without top-k and top-p are weighed."""
    per_block_max: bool
    """Whether that pass else looks for it in each block, see ``maxima.largest_in_each``."""

    @property
    def orders_candidates(self) -> bool:
        """Whether narrowing gives the candidates in descending order; else they are sorted where their order counts."""
        return self.picks_by != "choose"


def is_gpu(device: torch.device) -> bool:
    """Whether kernels for the device are Triton's rather than C++: the one question about a device that is asked."""
    return device.type == "cuda"


def row_class(rows: int, device: torch.device) -> int:
    """The rows whose kernels serve ``rows`` rows: 1, ``SMALL_ROWS`` or ``LARGE_ROWS``; in C++ 1 or the last."""
    return _row_class(rows, is_gpu(device))


def schedule_for(mode: Mode, rows: int, device: torch.device, edits: tuple[Edit, ...] = ()) -> Schedule:
    """The schedule of a mode for a batch.

    Args:
        mode: what is computed.
        rows: R, of the logits that the passes read.
        device: where they are.
        edits: of the logits, in their order.
    """
    return _resolved(mode, rows, is_gpu(device), torch.version.hip is None, edits)


def warmup_batches(
    mode: Mode, sizes: Iterable[int], times: int, device: torch.device, edits: tuple[Edit, ...] = ()
) -> list[tuple[int, int]]:
    """The batches that between them use the kernels of all batches of a mode: entries and rows of each.

    Of every pair of classes there is one, where possible the batch that its kernels are tuned for, because the first
    call of a class decides the tuning.

    Args:
        mode: what is computed.
        sizes: entries of the batches that will come.
        times: rows that an entry has at most; each has at least one.
        device: where they run.
        edits: of the logits.
    """
    typical = sorted({row_class(size, device) for size in (*sizes, 2)})
    found: dict[Any, tuple[int, int]] = {}
    for size in (*typical, *sorted(sizes)):
        for rows in (size * times, size):
            kernels = tuple((row_class(n, device), schedule_for(mode, n, device, edits)) for n in (size, rows))
            found.setdefault(kernels, (size, rows))
    return list(found.values())


@functools.lru_cache(maxsize=4096)
def _resolved(mode: Mode, rows: int, triton: bool, is_cuda: bool, edits: tuple[Edit, ...]) -> Schedule:
    size, size_class = mode.vocab_size, _row_class(rows, triton)
    narrows, few = mode.capacity > 0, triton and rows <= _FEW_ROWS
    return Schedule(
        mode=mode,
        edits=edits,
        order=_pass(size, _ORDER_BLOCKS[size_class], _ORDER_SLICE, triton),
        mass=_pass(size, _MASS_BLOCKS[size_class], _ORDER_SLICE, triton),
        race=_race_pass(size, size_class, triton),
        stored=Pass(size, STORED_BLOCK, _slices(STORED_BLOCK, _ORDER_SLICE) if triton else 1, triton),
        final=_pass(size, _FINAL_BLOCK, _ORDER_SLICE, triton),
        names_tokens=triton,
        # a bound of a NaN must be above all others: CUDA's arithmetic gives it a positive sign
        races_by_bounds=triton and is_cuda and not narrows and not mode.searches and _are_bounded(rows, mode),
        levels=_levels(size, triton) if narrows else (),
        picks_by="rank" if few and narrows else "choose" if triton else "select",
        fuses_levels=triton and narrows and not few and _are_fused(rows, mode),
        skips_rows=triton,
        row_max_kernel=triton and size_class == LARGE_ROWS,
        per_block_max=triton,
    )


def _row_class(rows: int, triton: bool) -> int:
    if rows == 1:
        return 1
    return SMALL_ROWS if triton and rows <= SMALL_ROWS else LARGE_ROWS


def _pass(vocab_size: int, block: int, slice_size: int, triton: bool) -> Pass:
    """A pass in blocks of so many tokens; in C++, where padding is a copy, in smaller ones if they divide the row."""
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
    """Whether a race by bounds is faster: for many rows of many logits."""
    fewest, most = (_FEW_ROWS, _MOST_READ_TWICE) if mode.filters_min_p else (SMALL_ROWS, _MOST_SCORED)
    return rows > fewest and rows * mode.vocab_size > most


def _are_fused(rows: int, mode: Mode) -> bool:
    """Whether a level of narrowing in one kernel is faster.

    Beside a pass over rows it takes longer: p .9 of 128 rows 76 us instead of 71, of 256 rows 133 instead of 119; but
    not where rows are short and many: 512 of 32,768 tokens 70 instead of 79.
    """
    beside_a_pass = mode.searches or mode.base_is_row
    fits = mode.capacity * FAN_OUT <= MOST_CHOSEN
    return fits and (not beside_a_pass or (rows >= _MANY_ROWS and mode.vocab_size <= _SHORT_ROW))


def _levels(vocab_size: int, triton: bool) -> tuple[int, ...]:
    """Block sizes of the levels of narrowing, of at most ``_MOST_RANKED`` blocks each in Triton.

    In C++, which selects among thousands as fast as it makes a level, the blocks of the first pass come first and
    tokens next: 0.3 ms instead of 0.5 for 8 rows of 151,936.
    """
    if vocab_size > _MOST_RANKED and not triton:
        return STORED_BLOCK, 1
    sizes = [1]
    while -(-vocab_size // sizes[-1]) > _MOST_RANKED:
        sizes.append(sizes[-1] * FAN_OUT)
    return tuple(reversed(sizes))
