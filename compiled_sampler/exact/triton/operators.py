"""The operators of the exact path on CUDA: thresholds, and winners of races under them, as torch defines them.

The hand-written part of the library: fixed torch passes could neither stop early nor skip a row. An operator launches,
in this order:

| operator | kernels |
| --- | --- |
| ``race_rows`` | race |
| ``race_beyond_candidates`` | race, bracket, measure, finish |
| ``race_top_k`` | bracket, measure, race, finish |
| ``search_threshold`` | bracket, measure, finish |

- ``race_kernel`` lets rows race over all their tokens, in parts. Those that are sure to race do in ``race_rows``,
  before their candidates are known, when it weighs every row. In the operators that also search, rows with top_k up to
  1,024 (``_LISTED_TOP_K``) skip it: the list will hold what they keep, and ``finish_kernel`` draws from the list.
- ``bracket_kernel`` closes a row if a part of it proves that top-p keeps the winner (``winner.py``). For the others,
  and where a threshold is wanted, it brackets the key of each filter's last token by a sample.
- ``measure_kernel`` reads the row once: the exact weight above either end of a bracket, and a list of what is inside,
  and above it if that is little: then what comes after needs the list alone. And MASS_AFTER_WINNER, which decides
  where nothing was proven.
- ``finish_kernel``, for a draw, lets parts race again whose winners are dropped, or, where few tokens are kept, the
  list (``winner.py``). A threshold it searches in the list, among keys that exist, and cuts ties by id; in the row
  itself where the exact weights say that the key is outside, where one key fills the bracket, or where the list was
  too short. A draw needs it there too, and under both filters.

Without top-p, in ``race_top_k``, nothing but the race needs a row's maximum: then the measuring pass is the first one,
and finds it too. A draw reads masks beside the logits; a threshold is searched in a copy that has them.

Weights are integers, so programs and atomics may come in any order. They follow ``mass.py`` operation by operation; the
launches turn FMA contraction off.

The fields of the records here are named as the arguments of the kernels, which take them by name.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from compiled_sampler.exact.triton import (
    BRACKETS,
    FEW_ROWS,
    GROUP,
    LONGEST,
    MOST_PARTS,
    TILE,
    list_capacity,
    list_stride,
    part_tiles,
    rows_of_program,
)
from compiled_sampler.exact.triton.bracket import bracket_kernel
from compiled_sampler.exact.triton.finish import finish_kernel
from compiled_sampler.exact.triton.measure import measure_kernel
from compiled_sampler.exact.triton.race import race_kernel
from compiled_sampler.exact.triton.rows import BRACKET_FIELDS, SUM_FIELDS

_SAMPLE, _RUN = 4096, 16  # tokens of a sample, in runs of neighbours
_SAMPLES = 8  # looked at for a proof, at most: a wait each
_STEPS = 4  # of the search in the sample: each leaves about a fifth
_DEVIATIONS = 4.5  # half of a bracket's width; more makes longer lists, less misses more often
_CAPACITY = LONGEST  # tokens of a list, or all of a row that has less
_FEW = 2048  # tokens above a bracket that are listed too, about: the search grows by them, the race ends with them
_LISTED_TOP_K = 1024  # top-k up to which a row skips the race and is searched: so few tokens nearly always fit the list
_RACE_LANES = 32  # a tile of a race: one warp, for which a mask has a word, decides if it scores
_RACE_DEPTH = TILE // _RACE_LANES
_MASS_DEPTH = 16  # the same where nothing is decided
_DEPTH, _LANES = 8, 32  # a tile of a pass over the row, of one warp: it takes room in the list once
_PROGRAMS, _PROGRAMS_OF_K = 28 * 132, 32 * 132  # as many as measure at once; without masses
_PROGRAMS_OF_FEW = 6 * 132  # of up to 32 rows with a race before, of which few are measured: most start for nothing
_RESIDENT, _WARPS = 8, 8  # a tile of the last search: tokens a thread, warps; a usual list, or most of it
_PIVOTS = 8  # tested a step: the time goes into a wait a step and arithmetic a pivot, about as much of either


class Rows(NamedTuple):
    """What all kernels take of the rows, ``[R]``."""

    logits: Tensor
    """float32, bfloat16 or float16 ``[R, >=V]``."""
    row_maxima: Tensor
    """float32."""
    scales: Tensor
    """float32."""
    top_ks: Tensor
    """int64."""
    vocab_size: int
    """V."""
    words: Tensor | None = None
    """int32 ``[R, >= ceil(V / 32)]``, a bit for each token that may be drawn; None for no mask."""


class Filters(NamedTuple):
    """What a search takes besides, ``[R]``, from ``threshold_from_candidates`` and the rows' parameters."""

    are_open: Tensor  # bool, ``Threshold.is_open``
    row_masses: Tensor  # int64; not read where no row has top-p
    top_ps: Tensor  # float64
    base_is_row: bool  # whether the base of top-p is the mass of the whole row


class Race(NamedTuple):
    """What a race takes besides, ``[R]``, and its result."""

    noise_masks: Tensor  # int32
    min_ps: Tensor  # float32, base-2 logarithms
    noise_keys: list[Tensor]  # four of int32, the ``NoiseKeys``
    part_winners: Tensor  # int64 ``[R, parts]``, packed (score key, id) of each part of a row
    tiles: int  # of a part


class Search(NamedTuple):
    """What the kernels leave for each other, as ``rows.py`` lays it out."""

    found: Tensor  # int64 ``[R]``, thresholds or winners
    brackets: Tensor  # int32 ``[R, BRACKET_FIELDS]``
    sums: Tensor  # int64 ``[R, SUM_FIELDS]``
    lists: Tensor  # int64 ``[R, list_stride(V)]``
    open_rows: Tensor  # int32 ``[R + 1]``, how many rows are open, and which


def empty_search(top_ks: Tensor, vocab_size: int) -> Search:
    """Memory for a search of as many rows."""
    num_rows = top_ks.shape[0]
    lists = top_ks.new_empty((num_rows, list_stride(vocab_size, _CAPACITY)))
    brackets = top_ks.new_empty((num_rows, BRACKET_FIELDS.value), dtype=torch.int32)
    open_rows = top_ks.new_empty((num_rows + 1,), dtype=torch.int32)
    return Search(torch.empty_like(top_ks), brackets, top_ks.new_empty((num_rows, SUM_FIELDS.value)), lists, open_rows)


def empty_parts(top_ks: Tensor, vocab_size: int, *, weighs: bool) -> tuple[Tensor, int]:
    """Memory for the winner of each part of a row ``[R, parts]``, and the tiles of a part."""
    tile = _RACE_DEPTH * _RACE_LANES  # TILE, but in tests of shorter parts
    tiles = part_tiles(vocab_size, top_ks.shape[0], tile, weighs=weighs)
    num_parts = triton.cdiv(vocab_size, tiles * tile)
    return top_ks.new_empty((top_ks.shape[0], num_parts)), tiles


def launch_race(
    rows: Rows,
    race: Race,
    races: Tensor,
    open_rows: Tensor,
    *,
    searched: bool,
    raced: Tensor | None = None,
    founds: Tensor | None = None,
    part_masses: Tensor | None = None,
) -> None:
    """Let rows race that ``races`` flags and that have not ``raced``; if ``searched``, not those with a small top-k."""
    # founds are tokens that winners may be worse than without being found; part_masses are measured.
    num_rows, num_parts = race.part_winners.shape
    is_second = raced is not None or founds is not None  # and what the first look leaves open is seldom much
    group = _group(rows.top_ks, weighs=part_masses is not None, seldom=is_second)
    optional = {"raced": raced, "founds": founds, "part_masses": part_masses}
    optional_or_unread = {
        name: race.part_winners if tensor is None else tensor for name, tensor in optional.items()
    }  # where not read
    _launch(
        race_kernel,
        (triton.cdiv(num_rows, group), num_parts),
        _arguments(rows, race) | optional_or_unread | {"races": races, "open_rows": open_rows},
        {
            "DEPTH": _RACE_DEPTH,
            "LANES": _RACE_LANES,
            "MASS_DEPTH": _MASS_DEPTH,
            "LISTED_TOP_K": _LISTED_TOP_K if searched else 0,
        }
        | {"SOME_RACED": raced is not None, "SOME_FOUND": founds is not None, "WEIGHS": part_masses is not None}
        | {"GROUP": group},
        num_warps=_RACE_LANES // 32,
    )


def launch_bracket(
    rows: Rows,
    filters: Filters,
    race: Race,
    search: Search,
    packed: Tensor,
    *,
    draws: bool,
    nan_bits: Tensor | None = None,
) -> None:
    """Bracket what is searched, and answer the other rows; with ``nan_bits`` before any other pass over the row."""
    num_rows, is_first = rows.logits.shape[0], nan_bits is not None
    arguments = {"packed": packed, "num_parts": race.part_winners.shape[1], "draws": int(draws)}
    _launch(
        bracket_kernel,
        (num_rows,),
        _arguments(rows, filters, race, search) | arguments | _or_unread(nan_bits, search),
        {"FIRST_PASS": is_first, "BASE_IS_ROW": filters.base_is_row, "SAMPLE": _SAMPLE, "RUN": _RUN, "STEPS": _STEPS}
        | {"DEVIATIONS": _DEVIATIONS, "PIVOTS": _PIVOTS, "FEW": _FEW, "MAX_PARTS": MOST_PARTS}
        | {"MAX_SAMPLES": _SAMPLES},
        maxnreg=128,
        num_warps=4 if is_first and num_rows > BRACKETS else 8,
    )


def launch_measure(
    rows: Rows, filters: Filters, search: Search, *, draws: bool, nan_bits: Tensor | None = None
) -> None:
    """Measure around the brackets, and list what is inside; ``nan_bits`` as ``launch_bracket``."""
    num_rows, is_first = rows.logits.shape[0], nan_bits is not None
    num_tiles = num_rows * triton.cdiv(rows.vocab_size, _DEPTH * _LANES)
    programs, registers = (_PROGRAMS_OF_K, 64) if is_first else (_PROGRAMS, 72)  # for each thread, so that all do run
    if draws and not is_first and num_rows <= FEW_ROWS:
        programs = _PROGRAMS_OF_FEW
    _launch(
        measure_kernel,
        (min(num_tiles, programs),),
        _arguments(rows, filters, search) | _or_unread(nan_bits, search),
        {"ALL_ROWS": is_first or not draws, "FIRST_PASS": is_first, "DEPTH": _DEPTH, "LANES": _LANES}
        | _list_size(rows),
        num_warps=_LANES // 32,
        maxnreg=registers,
    )


def launch_finish(rows: Rows, filters: Filters, race: Race, search: Search, *, draws: bool) -> None:
    """Find thresholds, or the winners under them."""
    part_size = race.tiles * _RACE_DEPTH * _RACE_LANES
    arguments = {"num_parts": race.part_winners.shape[1], "part_size": part_size, "draws": int(draws)}
    _launch(
        finish_kernel,
        (rows.logits.shape[0],),
        _arguments(rows, filters, race, search) | arguments,
        {"BASE_IS_ROW": filters.base_is_row, "LANES": 32 * _WARPS, "DEPTH": _RESIDENT, "PIVOTS": _PIVOTS}
        | {**_list_size(rows), "MAX_PARTS": MOST_PARTS, "LISTED_TOP_K": _LISTED_TOP_K},
        num_warps=_WARPS,
    )


@functools.cache
def early(device: torch.device) -> dict[str, bool]:
    """How a kernel is launched that starts while the one before it ends, and begins by waiting for that end."""
    # GPUs before Hopper launch one after the other, and so does Triton's interpreter.
    can = torch.version.hip is None and not triton.knobs.runtime.interpret
    can = can and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


def _launch(
    kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], constants: dict[str, Any], **options: int
) -> None:
    """Launch a kernel with those of the arguments that it takes, without FMA contraction: masses are exact."""
    taken = {name: arguments[name] for name in kernel.arg_names if name in arguments}
    options_of_all = {"enable_fp_fusion": False, **early(arguments["logits"].device)}
    launcher = kernel if triton.knobs.runtime.interpret else wrap_triton(kernel)  # torch 2.11 wraps no interpreted one
    launcher[grid](**taken, **constants, **options, **options_of_all)


def _arguments(rows: Rows, *records: Filters | Race | Search) -> dict[str, Any]:
    """The fields of the records and what follows from the logits, by the names of the kernels' arguments."""
    arguments: dict[str, Any] = {"num_rows": rows.logits.shape[0], "row_stride": rows.logits.stride(0)}
    for record in (rows, *records):
        arguments |= record._asdict()
        if isinstance(record, Race):
            arguments |= zip(("firsts", "seconds", "thirds", "fourths"), record.noise_keys, strict=True)
    if rows.words is None:
        return arguments | {"MASKED": False, "words": rows.top_ks, "word_stride": 0}  # something that is not read
    return arguments | {"MASKED": True, "word_stride": rows.words.stride(0)}


def _list_size(rows: Rows) -> dict[str, int]:
    """The constants of a kernel with lists: of what a list holds, and from list to list."""
    sizes = (rows.vocab_size, _CAPACITY)
    return {"CAPACITY": list_capacity(*sizes), "STRIDE": list_stride(*sizes)}


def _or_unread(nan_bits: Tensor | None, search: Search) -> dict[str, Tensor]:
    """The argument ``nan_bits``; without any, something in its place that is not touched."""
    return {"nan_bits": search.brackets if nan_bits is None else nan_bits}


def _group(top_ks: Tensor, *, weighs: bool = False, seldom: bool = False) -> int:
    """Rows of ``[R]`` that a program of a race looks at: several of many rows, and of fewer that ``seldom`` race."""
    return GROUP if seldom and not weighs and top_ks.shape[0] >= GROUP else rows_of_program(top_ks.shape[0], weighs)


@triton_op("compiled_sampler::search_threshold", mutates_args=())
def search_threshold(
    logits: Tensor,
    packed: Tensor,
    is_open: Tensor,
    row_mass: Tensor,
    row_max: Tensor,
    scale: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    vocab_size: int,
    base_is_row: bool,
) -> Tensor:
    """The threshold of every row, searching the open ones; arguments as ``threshold.search_threshold``."""
    rows = Rows(logits, row_max, scale, top_k, vocab_size)
    filters, search = Filters(is_open, row_mass, top_p, base_is_row), empty_search(top_k, vocab_size)
    # draws=False: the kernels read nothing of a race. These tensors stand in for it by their dtypes alone, so that one
    # compiled kernel serves draws too.
    unread = search.brackets
    race = Race(unread, row_max, [unread] * 4, packed[:, None], 1)
    launch_bracket(rows, filters, race, search, packed, draws=False)
    launch_measure(rows, filters, search, draws=False)
    launch_finish(rows, filters, race, search, draws=False)
    return search.found


@triton_op("compiled_sampler::race_beyond_candidates", mutates_args=())
def race_beyond_candidates(
    logits: Tensor,
    packed: Tensor,
    is_open: Tensor,
    races: Tensor,
    row_mass: Tensor,
    row_max: Tensor,
    scale: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    noise_mask: Tensor,
    min_p_log2: Tensor,
    keys: list[Tensor],
    raced: Tensor,
    words: Tensor | None,
    vocab_size: int,
    base_is_row: bool,
) -> Tensor:
    """The winner of every row that races, int64 ``[R, 1]``; arguments as ``row_race.race_beyond_candidates``."""
    rows = Rows(logits, row_max, scale, top_k, vocab_size, words)
    filters, search = Filters(is_open, row_mass, top_p, base_is_row), empty_search(top_k, vocab_size)
    part_winners, tiles = empty_parts(top_k, vocab_size, weighs=True)  # the parts of race_rows, which raced before
    assert raced.shape == part_winners.shape
    race = Race(noise_mask, min_p_log2, keys, part_winners, tiles)
    launch_race(rows, race, races, search.open_rows, searched=True, raced=raced)
    launch_bracket(rows, filters, race, search, packed, draws=True)
    launch_measure(rows, filters, search, draws=True)
    launch_finish(rows, filters, race, search, draws=True)
    return search.found[:, None]


@triton_op("compiled_sampler::race_top_k", mutates_args=())
def race_top_k(
    logits: Tensor,
    live: Tensor,
    scale: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    noise_mask: Tensor,
    min_p_log2: Tensor,
    keys: list[Tensor],
    words: Tensor | None,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """The winner of every row and its ``nan_bits``, ``[R, 1]`` each; arguments as ``row_race.race_top_k``."""
    row_max, nan_bits = torch.empty_like(scale), torch.empty_like(noise_mask)
    rows = Rows(logits, row_max, scale, top_k, vocab_size, words)
    filters = Filters(live, row_masses=top_k, top_ps=top_p, base_is_row=False)  # masses are not read: any int64
    search = empty_search(top_k, vocab_size)
    race = Race(noise_mask, min_p_log2, keys, *empty_parts(top_k, vocab_size, weighs=False))
    packed = top_k  # not read in a first pass: any int64
    launch_bracket(rows, filters, race, search, packed, draws=True, nan_bits=nan_bits)
    launch_measure(rows, filters, search, draws=True, nan_bits=nan_bits)
    launch_race(rows, race, live, search.open_rows, searched=True)
    launch_finish(rows, filters, race, search, draws=True)
    return search.found[:, None], nan_bits[:, None]


@triton_op("compiled_sampler::race_rows", mutates_args=())
def race_rows(
    logits: Tensor,
    races: Tensor,
    row_max: Tensor,
    scale: Tensor,
    top_k: Tensor,
    noise_mask: Tensor,
    min_p_log2: Tensor,
    keys: list[Tensor],
    found: Tensor | None,
    words: Tensor | None,
    vocab_size: int,
    weighs: bool,
) -> tuple[Tensor, Tensor]:
    """The winner of each part of a row that only min_p filters; with ``weighs`` also the mass of each part."""
    # Both are int64 [R, n], the masses [R, 0] without weighs; see row_race.race_rows and row_race.race_and_weigh.
    rows = Rows(logits, row_max, scale, top_k, vocab_size, words)
    race = Race(noise_mask, min_p_log2, keys, *empty_parts(top_k, vocab_size, weighs=weighs))
    num_rows, num_parts = race.part_winners.shape
    masses, open_rows = (
        race.part_winners.new_empty((num_rows, num_parts if weighs else 0)),
        torch.empty_like(noise_mask),
    )
    part_masses = masses if weighs else None
    launch_race(rows, race, races, open_rows, searched=False, founds=found, part_masses=part_masses)
    return race.part_winners, masses
