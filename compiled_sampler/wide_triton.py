"""The wide path on CUDA: the threshold that ``wide.sorted_threshold`` defines, or the winner of the race under it.

The hand-written part of the library: fixed torch passes could neither stop early nor skip a row. Up to four kernels:

1. ``race_kernel``, for a draw, lets rows race over all their tokens, in parts.
2. ``guess_kernel`` is done with a row if a part of it proves that top-p keeps the winner (``wide_proof_triton.py``).
   For the others, and where a threshold is asked for, it brackets the key of each filter's last token by a sample.
3. ``measure_kernel`` reads the row once: the exact weight above either end of a bracket, and a list of what is inside,
   and above it if that is little: then what comes after needs the list alone.
4. ``finish_kernel`` searches the list, among keys that exist, and cuts ties by id. It searches the row itself where
   the exact weights say that the key is outside, where one key fills the bracket, or where the list was too short.
   For a draw it lets parts race again whose winners the threshold drops, or, where few tokens are kept, the list.

Weights are integers, so programs and atomics may come in any order. They follow ``mass.py`` operation by operation; the
launches turn FMA contraction off.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from compiled_sampler.wide_bracket_triton import guess_kernel
from compiled_sampler.wide_finish_triton import finish_kernel
from compiled_sampler.wide_keys_triton import early
from compiled_sampler.wide_measure_triton import measure_kernel
from compiled_sampler.wide_race_triton import race_kernel

_SAMPLE, _RUN = 4096, 8  # tokens of a sample, in runs of neighbours
_SAMPLES = 8  # looked at for a proof, at most: a wait each
_STEPS = 4  # of the search in the sample: each leaves about a fifth
_DEVIATIONS = 4.5  # half of a bracket's width; more makes longer lists, less misses more often
_CAPACITY = 24576  # tokens of a list; a bracket holds about _DEVIATIONS / sqrt(_SAMPLE) of a row at most
_FEW = 2048  # tokens above a bracket that are listed too, about: the search grows by them, the race ends with them
_RACED = 1024  # top-k above which a row races before it is searched: so few are always listed, as far as is likely
_MOST_PARTS = 256  # of a row in the race: a program each
_DEPTH, _LANES = 8, 128  # a tile of a pass over the row: tokens a thread, threads
_PROGRAMS, _MOST_PROGRAMS = 24 * 132, 256  # measuring all rows, about, and one row, at most
_RESIDENT, _WARPS = 16, 8  # a tile of the last search: tokens a thread, warps; a usual list is one tile, or two
_PIVOTS = 8  # tested a step: the time goes into a wait a step and arithmetic a pivot, about as much of either
_SUMS = 8


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
    rows = (packed, pending, row_mass, row_max, scale, top_k, top_p)
    return _searched(logits, rows, None, vocab_size, base_is_row, 0)


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
    vocab_size: int,
    base_is_row: bool,
    parts: int,
) -> Tensor:
    """The winner of every row that races, int64 ``[R, 1]``; arguments as ``wide_race.race_beyond``."""
    race = (noise_mask, min_p_log2, *keys)
    part_winners = _raced(logits, beyond, (row_max, scale, top_k), race, vocab_size, parts)
    rows = (packed, pending, row_mass, row_max, scale, top_k, top_p)
    race = (part_winners, *race)
    return _searched(logits, rows, race, vocab_size, base_is_row, _part_tiles(vocab_size, parts))[:, None]


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
    vocab_size: int,
    parts: int,
) -> Tensor:
    """The winner of each part of a row that only min_p filters: int64 ``[R, n]``; as ``wide_race.race_beyond``."""
    return _raced(logits, beyond, (row_max, scale, top_k), (noise_mask, min_p_log2, *keys), vocab_size, parts)


def _part_tiles(vocab_size: int, parts: int) -> int:
    """Tiles of a part of a row, of which there are ``parts`` at most."""
    return int(triton.cdiv(triton.cdiv(vocab_size, _DEPTH * _LANES), parts))


def _raced(
    logits: Tensor, beyond: Tensor, rows: tuple[Tensor, ...], race: tuple[Tensor, ...], vocab_size: int, parts: int
) -> Tensor:
    """Launch the race of rows ``beyond`` the candidates."""
    tiles = _part_tiles(vocab_size, parts)
    grid = (logits.shape[0], triton.cdiv(vocab_size, tiles * _DEPTH * _LANES))
    winners = rows[-1].new_empty(grid)
    wrap_triton(race_kernel)[grid](
        logits, logits.stride(0), beyond, *rows, *race, winners, vocab_size, tiles,
        DEPTH=_DEPTH, LANES=_LANES, FEW=_RACED, num_warps=_LANES // 32, enable_fp_fusion=False, **early(logits.device),
    )  # fmt: skip
    return winners


def _searched(
    logits: Tensor,
    rows: tuple[Tensor, ...],
    race: tuple[Tensor, ...] | None,
    vocab_size: int,
    base_is_row: bool,
    part_tiles: int,
) -> Tensor:
    """Launch the search: thresholds, or, after a race, winners; int64 ``[R]``."""
    packed, pending, row_mass, row_max, scale, top_k, top_p = rows
    num_rows, stride, draws = logits.shape[0], logits.stride(0), int(race is not None)
    num_tiles = triton.cdiv(vocab_size, _DEPTH * _LANES)
    tiles = triton.cdiv(num_tiles, min(_MOST_PROGRAMS, max(1, _PROGRAMS // num_rows)))
    found = torch.empty_like(packed)
    brackets, sums = packed.new_empty((num_rows, 8), dtype=torch.int32), packed.new_empty((num_rows, _SUMS))
    keys = packed.new_empty((num_rows, _CAPACITY), dtype=torch.int32)
    ids = torch.empty_like(keys)
    if race is None:  # which no kernel will read then
        race = (packed[:, None], brackets, row_max, brackets, brackets, brackets, brackets)
    part_winners, *race_of_rows = race
    num_parts, part_size = part_winners.shape[1], part_tiles * _DEPTH * _LANES
    wrap_triton(guess_kernel)[(num_rows,)](
        logits, stride, row_max, row_mass, scale, top_k, top_p, pending, packed, found, brackets, sums, part_winners,
        num_parts, vocab_size, draws, BASE_IS_ROW=base_is_row, SAMPLE=_SAMPLE, RUN=_RUN, STEPS=_STEPS,
        DEVIATIONS=_DEVIATIONS, PIVOTS=_PIVOTS, SUMS=_SUMS, FEW=_FEW, PARTS=_MOST_PARTS, MOST=_SAMPLES, num_warps=8,
        enable_fp_fusion=False, **early(logits.device),
    )  # fmt: skip
    wrap_triton(measure_kernel)[(num_rows, triton.cdiv(num_tiles, tiles))](
        logits, stride, row_max, scale, top_k, top_p, brackets, sums, keys, ids, vocab_size, tiles, DEPTH=_DEPTH,
        LANES=_LANES, CAPACITY=_CAPACITY, SUMS=_SUMS, num_warps=4, enable_fp_fusion=False, **early(logits.device),
    )  # fmt: skip
    wrap_triton(finish_kernel)[(num_rows,)](
        logits, stride, row_max, row_mass, scale, top_k, top_p, *race_of_rows, brackets, sums, keys, ids, part_winners,
        num_parts, part_size, found, vocab_size, draws, BASE_IS_ROW=base_is_row, LANES=32 * _WARPS, DEPTH=_RESIDENT,
        PIVOTS=_PIVOTS, CAPACITY=_CAPACITY, SUMS=_SUMS, PARTS=_MOST_PARTS, FEW=_RACED, num_warps=_WARPS,
        enable_fp_fusion=False, **early(logits.device),
    )  # fmt: skip
    return found
