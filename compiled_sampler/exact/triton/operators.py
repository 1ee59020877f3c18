"""The wide path on CUDA: the threshold that ``wide.py`` defines, or the winner of the race under it.

The hand-written part of the library: fixed torch passes could neither stop early nor skip a row. Up to four kernels:

1. ``race_kernel``, for a draw, lets rows race over all their tokens, in parts. Those that are sure to race did before
   their candidates were known, in the same kernel, when it weighed every row.
2. ``guess_kernel`` is done with a row if a part of it proves that top-p keeps the winner (``wide_proof_triton.py``).
   For the others, and where a threshold is asked for, it brackets the key of each filter's last token by a sample.
3. ``measure_kernel`` reads the row once: the exact weight above either end of a bracket, and a list of what is inside,
   and above it if that is little: then what comes after needs the list alone. And the mass behind the winner, which
   decides where nothing was proven.
4. ``finish_kernel``, for a draw, lets parts race again whose winners are dropped, or, where few tokens are kept, the
   list (``wide_settle_triton.py``). A threshold it searches in the list, among keys that exist, and cuts ties by id;
   in the row itself where the exact weights say that the key is outside, where one key fills the bracket, or where the
   list was too short. A draw asks for it there too, and under both filters.

Without top-p nothing but the race asks for a row's maximum: then the measuring pass is the first one, and finds it too.

Weights are integers, so programs and atomics may come in any order. They follow ``mass.py`` operation by operation; the
launches turn FMA contraction off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from compiled_sampler.exact.triton.bracket import guess_kernel
from compiled_sampler.exact.triton.finish import finish_kernel
from compiled_sampler.exact.triton.keys import early
from compiled_sampler.exact.triton.measure import measure_kernel
from compiled_sampler.exact.triton.race import race_kernel
from compiled_sampler.exact.triton.token_list import SPARE

_SAMPLE, _RUN = 4096, 16  # tokens of a sample, in runs of neighbours
_GUESSES = 2 * 132  # rows whose guesses run at once with 8 warps each; of more rows, without masses, with 4
_SAMPLES = 8  # looked at for a proof, at most: a wait each
_STEPS = 4  # of the search in the sample: each leaves about a fifth
_DEVIATIONS = 4.5  # half of a bracket's width; more makes longer lists, less misses more often
_CAPACITY = 24576  # tokens of a list; a bracket holds about _DEVIATIONS / sqrt(_SAMPLE) of a row at most
_FEW = 2048  # tokens above a bracket that are listed too, about: the search grows by them, the race ends with them
_RACED = 1024  # top-k above which a row races before it is searched: so few are always listed, as far as is likely
_RACING, _LEAST_PARTS, _MOST_PARTS = 24 * 132, 12, 256  # programs that race at once; parts of a row, one each
_RACE_DEPTH, _RACE_LANES = 4, 32  # a tile of a race: one warp decides whether it computes scores
_MASS_DEPTH = 16  # the same where nothing is decided
_GROUP = 4  # rows of a large batch that a program looks at, where few race: thousands that end at once take 5 us
_DEPTH, _LANES = 8, 32  # a tile of a pass over the row, of one warp: it takes room in the list once
_PROGRAMS, _PROGRAMS_OF_K = 28 * 132, 32 * 132  # as many as measure at once; without masses
_PROGRAMS_OF_FEW = 6 * 132  # of up to 32 rows with a race before, of which few are measured: most start for nothing
_RESIDENT, _WARPS = 8, 8  # a tile of the last search: tokens a thread, warps; a usual list, or most of it
_PIVOTS = 8  # tested a step: the time goes into a wait a step and arithmetic a pivot, about as much of either
_SUMS = 8
_FEW_ROWS = 32  # up to which a program of a race looks at one row


class _Rows(NamedTuple):
    """Parameters and masses ``[R]``, as ``wide.wide_threshold`` has them."""

    pending: Tensor
    row_mass: Tensor
    row_max: Tensor
    scale: Tensor
    top_k: Tensor
    top_p: Tensor


class _Race(NamedTuple):
    """What the race needs besides, ``[R]``, and the winners of parts of a row, int64 ``[R, n]``."""

    noise_mask: Tensor
    min_p_log2: Tensor
    keys: tuple[Tensor, ...]
    part_winners: Tensor
    part_tiles: int
    """Tiles of a part."""


class _Search(NamedTuple):
    """What the kernels leave for each other, a row a request."""

    found: Tensor
    """int64 ``[R]``, thresholds or winners."""
    brackets: Tensor
    """int32 ``[R, 8]``."""
    sums: Tensor
    """int64 ``[R, 8]``."""
    lists: Tensor
    """int64 ``[R, n]``, see ``wide_list_triton.py``."""
    open_rows: Tensor
    """int32 ``[R + 1]``, how many rows are open, and which."""


@triton_op("compiled_sampler::wide_search", mutates_args=())
def wide_search(
    logits: Tensor,
    packed: Tensor,
    pending: Tensor,
    row_mass: Tensor,
    row_max: Tensor,
    scale: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    vocab_size: int,
    base_is_row: bool,
) -> Tensor:
    """The threshold of every row, searching the pending ones; arguments as ``wide.wide_threshold``."""
    rows = _Rows(pending, row_mass, row_max, scale, top_k, top_p)
    search = _empty(top_k)
    number = search.brackets  # stands for what is not read without a race
    race = _Race(number, row_max, (number,) * 4, packed[:, None], 1)
    _guess(logits, rows, packed, race, search, vocab_size, base_is_row, draws=False)
    _measure(logits, rows, search, vocab_size, draws=False)
    _finish(logits, rows, race, search, vocab_size, base_is_row, draws=False)
    return search.found


@triton_op("compiled_sampler::wide_draw", mutates_args=())
def wide_draw(
    logits: Tensor,
    packed: Tensor,
    pending: Tensor,
    beyond: Tensor,
    row_mass: Tensor,
    row_max: Tensor,
    scale: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    noise_mask: Tensor,
    min_p_log2: Tensor,
    keys: list[Tensor],
    raced: Tensor,
    vocab_size: int,
    base_is_row: bool,
) -> Tensor:
    """The winner of every row that races, int64 ``[R, 1]``; arguments as ``wide_race.race_beyond``."""
    rows = _Rows(pending, row_mass, row_max, scale, top_k, top_p)
    race = _Race(noise_mask, min_p_log2, tuple(keys), torch.empty_like(raced), _part_tiles(vocab_size, raced.shape[0]))
    search = _empty(top_k)
    _race(logits, beyond, row_max, scale, top_k, race, search.open_rows, vocab_size, few=_RACED, raced=raced)
    _guess(logits, rows, packed, race, search, vocab_size, base_is_row, draws=True)
    _measure(logits, rows, search, vocab_size, draws=True)
    _finish(logits, rows, race, search, vocab_size, base_is_row, draws=True)
    return search.found[:, None]


@triton_op("compiled_sampler::wide_top_k", mutates_args=())
def wide_top_k(
    logits: Tensor,
    live: Tensor,
    scale: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    noise_mask: Tensor,
    min_p_log2: Tensor,
    keys: list[Tensor],
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """The winner of every row and its ``nan_bits``, ``[R, 1]`` each; arguments as ``wide_race.race_top_k``."""
    row_max, magnitudes = torch.empty_like(scale), torch.empty_like(noise_mask)
    rows = _Rows(live, top_k, row_max, scale, top_k, top_p)  # without top-p the mass is not read
    race = _Race(noise_mask, min_p_log2, tuple(keys), *_parts(top_k, vocab_size, _group(top_k)))
    search = _empty(top_k)
    _guess(logits, rows, top_k, race, search, vocab_size, False, draws=True, magnitudes=magnitudes)
    _measure(logits, rows, search, vocab_size, draws=True, magnitudes=magnitudes)
    _race(logits, live, row_max, scale, top_k, race, search.open_rows, vocab_size, few=_RACED)
    _finish(logits, rows, race, search, vocab_size, False, draws=True)
    return search.found[:, None], magnitudes[:, None]


@triton_op("compiled_sampler::wide_race", mutates_args=())
def wide_race(
    logits: Tensor,
    beyond: Tensor,
    row_max: Tensor,
    scale: Tensor,
    top_k: Tensor,
    noise_mask: Tensor,
    min_p_log2: Tensor,
    keys: list[Tensor],
    found: Tensor | None,
    vocab_size: int,
    weighs: bool,
) -> tuple[Tensor, Tensor]:
    """The winner of each part of a row that only min_p filters, and if asked for the mass of each part of every row.

    Int64 ``[R, n]`` each, the second ``[R, 0]`` if not; as ``wide_race.race_rows`` and ``wide_race.race_and_weigh``.
    """
    race = _Race(noise_mask, min_p_log2, tuple(keys), *_parts(top_k, vocab_size, _group(top_k, weighs=weighs)))
    num_rows, num_parts = race.part_winners.shape
    masses = race.part_winners.new_empty((num_rows, num_parts if weighs else 0))
    given, open_rows = {"found": found, "masses": masses if weighs else None}, torch.empty_like(noise_mask)
    _race(logits, beyond, row_max, scale, top_k, race, open_rows, vocab_size, few=0, **given)
    return race.part_winners, masses


def _empty(top_k: Tensor) -> _Search:
    """Memory for a search of as many rows."""
    num_rows = top_k.shape[0]
    lists = top_k.new_empty((num_rows, _CAPACITY + SPARE.value))
    brackets, sums = top_k.new_empty((num_rows, 8), dtype=torch.int32), top_k.new_empty((num_rows, _SUMS))
    open_rows = top_k.new_empty((num_rows + 1,), dtype=torch.int32)
    return _Search(torch.empty_like(top_k), brackets, sums, lists, open_rows)


def _group(top_k: Tensor, *, weighs: bool = False, seldom: bool = False) -> int:
    """Rows of ``[R]`` that a program of a race looks at: several of many rows, and of fewer that ``seldom`` race."""
    least = _GROUP if seldom else _FEW_ROWS + 1
    return 1 if weighs or top_k.shape[0] < least else _GROUP


def _part_tiles(vocab_size: int, num_rows: int) -> int:
    """Tiles of a part of a row, so that all programs run at once, unless parts would be long to race again."""
    parts = max(_LEAST_PARTS, min(_RACING // max(num_rows, 1), _MOST_PARTS))
    return int(triton.cdiv(triton.cdiv(vocab_size, _RACE_DEPTH * _RACE_LANES), parts))


def _parts(top_k: Tensor, vocab_size: int, group: int) -> tuple[Tensor, int]:
    """Memory for the winner of each part of a row ``[R, n]``, and the tiles of a part, for programs of so many rows."""
    tiles = _part_tiles(vocab_size, triton.cdiv(top_k.shape[0], group))
    num_parts = triton.cdiv(vocab_size, tiles * _RACE_DEPTH * _RACE_LANES)
    return top_k.new_empty((top_k.shape[0], num_parts)), tiles


def _race(
    logits: Tensor, beyond: Tensor, row_max: Tensor, scale: Tensor, top_k: Tensor, race: _Race, open_rows: Tensor,
    vocab_size: int, *, few: int, raced: Tensor | None = None, found: Tensor | None = None,
    masses: Tensor | None = None,
) -> None:  # fmt: skip
    """Let rows ``beyond`` the candidates race that have not ``raced``, but those whose top-k keeps ``few`` tokens."""
    num_rows, num_parts = race.part_winners.shape
    is_second = raced is not None or found is not None  # and what the first look leaves open is seldom much
    group = _group(top_k, weighs=masses is not None, seldom=is_second)
    wrap_triton(race_kernel)[(triton.cdiv(num_rows, group), num_parts)](
        logits, logits.stride(0), beyond, row_max, scale, top_k, race.noise_mask, race.min_p_log2, *race.keys,
        *(race.part_winners if each is None else each for each in (raced, found)), race.part_winners,
        race.part_winners if masses is None else masses, open_rows, num_rows, vocab_size, race.part_tiles,
        DEPTH=_RACE_DEPTH, LANES=_RACE_LANES, MASS_DEPTH=_MASS_DEPTH, FEW=few, AGAIN=raced is not None,
        FOUND=found is not None, WEIGHS=masses is not None, GROUP=group, num_warps=_RACE_LANES // 32,
        enable_fp_fusion=False, **early(logits.device),
    )  # fmt: skip


def _guess(
    logits: Tensor, rows: _Rows, packed: Tensor, race: _Race, search: _Search, vocab_size: int, base_is_row: bool,
    *, draws: bool, magnitudes: Tensor | None = None,
) -> None:  # fmt: skip
    """Settle rows, or bracket what is searched; with ``magnitudes`` before any other pass over the row."""
    num_rows, is_first = logits.shape[0], magnitudes is not None
    wrap_triton(guess_kernel)[(num_rows,)](
        logits, logits.stride(0), rows.row_max, search.brackets if magnitudes is None else magnitudes, rows.row_mass,
        rows.scale, rows.top_k, rows.top_p, rows.pending, packed, search.found, search.brackets, search.sums,
        race.part_winners, race.part_winners.shape[1], search.open_rows, vocab_size, int(draws),
        FIRST=is_first, BASE_IS_ROW=base_is_row, SAMPLE=_SAMPLE, RUN=_RUN, STEPS=_STEPS, DEVIATIONS=_DEVIATIONS,
        PIVOTS=_PIVOTS, SUMS=_SUMS, FEW=_FEW, PARTS=_MOST_PARTS, MOST=_SAMPLES, maxnreg=128,
        num_warps=4 if is_first and num_rows > _GUESSES else 8, enable_fp_fusion=False, **early(logits.device),
    )  # fmt: skip


def _measure(
    logits: Tensor, rows: _Rows, search: _Search, vocab_size: int, *, draws: bool, magnitudes: Tensor | None = None
) -> None:
    """Measure around the brackets, and list what is inside; ``magnitudes`` as ``_guess``."""
    num_rows, is_first = logits.shape[0], magnitudes is not None
    num_tiles = num_rows * triton.cdiv(vocab_size, _DEPTH * _LANES)
    programs, registers = (_PROGRAMS_OF_K, 64) if is_first else (_PROGRAMS, 72)  # for each thread, so that all do run
    if draws and not is_first and num_rows <= _FEW_ROWS:
        programs = _PROGRAMS_OF_FEW
    wrap_triton(measure_kernel)[(min(num_tiles, programs),)](
        logits, logits.stride(0), rows.row_max, search.brackets if magnitudes is None else magnitudes, rows.scale,
        rows.top_k, rows.top_p, search.brackets, search.sums, search.lists,
        search.open_rows, num_rows, vocab_size,
        ALL=is_first or not draws, FIRST=is_first, DEPTH=_DEPTH, LANES=_LANES, CAPACITY=_CAPACITY, SUMS=_SUMS,
        num_warps=_LANES // 32, maxnreg=registers, enable_fp_fusion=False, **early(logits.device),
    )  # fmt: skip


def _finish(
    logits: Tensor, rows: _Rows, race: _Race, search: _Search, vocab_size: int, base_is_row: bool, *,
    draws: bool,
) -> None:  # fmt: skip
    """Find thresholds, or the winners under them."""
    part_size = race.part_tiles * _RACE_DEPTH * _RACE_LANES
    wrap_triton(finish_kernel)[(logits.shape[0],)](
        logits, logits.stride(0), rows.row_max, rows.row_mass, rows.scale, rows.top_k, rows.top_p, race.noise_mask,
        race.min_p_log2, *race.keys, search.brackets, search.sums, search.lists,
        race.part_winners, race.part_winners.shape[1], part_size, search.found, vocab_size, int(draws),
        BASE_IS_ROW=base_is_row, LANES=32 * _WARPS, DEPTH=_RESIDENT, PIVOTS=_PIVOTS, CAPACITY=_CAPACITY, SUMS=_SUMS,
        PARTS=_MOST_PARTS, FEW=_RACED, num_warps=_WARPS, enable_fp_fusion=False, **early(logits.device),
    )  # fmt: skip
