"""The wide path on CUDA: a search for the threshold that ``wide.sorted_threshold`` defines, several programs a row.

The hand-written part of the library: fixed torch passes could neither stop early nor skip a row. Three kernels:

1. ``guess_kernel`` brackets the key of each filter's last token by a sample of the row.
2. ``measure_kernel`` reads the row once: the exact weight above either end of a bracket, and a list of what is inside,
   and above it if that is little: then the race after the search needs the list alone.
3. ``_finish_kernel`` searches the list, among keys that exist, and cuts ties by id. It searches the row itself where
   the exact weights say that the key is outside, where one key fills the bracket, or where the list was too short.

Weights are integers, so programs and atomics may come in any order. They follow ``mass.py`` operation by operation; the
launches turn FMA contraction off.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from compiled_sampler.wide_bracket_triton import guess_kernel
from compiled_sampler.wide_keys_triton import ANYWHERE, early, exp2_mass, finite, key_float, order_key
from compiled_sampler.wide_measure_triton import measure_kernel
from compiled_sampler.wide_search_triton import NOTHING, STREAM, last_value, load_tile, masses, places

_SAMPLE, _RUN = 4096, 8  # tokens of a sample, in runs of neighbours
_STEPS = 4  # of the search in the sample: each leaves about a fifth
_DEVIATIONS = 4.5  # half of a bracket's width; more makes longer lists, less misses more often
_CAPACITY = 24576  # tokens of a list; a bracket holds about _DEVIATIONS / sqrt(_SAMPLE) of a row at most
_FEW = 2048  # tokens above a bracket that are listed too, about: the search grows by them, the race ends with them
_DEPTH, _LANES = 8, 128  # a tile of the measuring pass: tokens a thread, threads
_PROGRAMS, _MOST_PROGRAMS = 24 * 132, 256  # measuring all rows, about, and one row, at most
_RESIDENT, _WARPS = 16, 8  # a tile of the last search: tokens a thread, warps; a usual list is one tile, or two
_PIVOTS = 8  # tested a step: the time goes into a wait a step and arithmetic a pivot, about as much of either
_SUMS = 8


@triton.jit
def _search(
    key, weights, row, keys, ids, list_size, bracket, above_last, with_first, limit, top, row_max, scale,
    vocab_size, MASS: tl.constexpr, CAPACITY: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr,
    PIVOTS: tl.constexpr,
):  # fmt: skip
    """The last packed key with less than ``limit`` weight above it, the ties that takes, whether the list was searched.

    ``key`` and ``weights`` are the first tile of the list, ``bracket`` where its first and last key are.
    """
    first, last = tl.load(bracket), tl.load(bracket + 1)
    is_over = above_last >= limit
    is_under = (with_first < limit) & (first > -2147483648) & (above_last < limit)
    listed = (list_size <= CAPACITY) & (first < last) & (is_over | is_under == 0)
    size = tl.where(listed, list_size, vocab_size).to(tl.int32)
    least = tl.where(is_over, last + 1, tl.where(is_under, -2147483648, first))
    most = tl.where(is_over, top, tl.where(is_under, first - 1, last))
    above = tl.where(is_over, 0, tl.where(is_under, with_first, above_last))
    values = tl.where(listed, key, NOTHING)
    found, above = last_value(
        values, weights, row, keys, ids, listed, size, 0, least, most, above, limit, row_max, scale,
        MASS, False, LANES, DEPTH, PIVOTS,
    )  # fmt: skip
    weight = tl.full((), 1, tl.int64)
    if MASS:
        weight = exp2_mass(key_float(found), row_max, scale)
    needed = tl.where(weight > 0, (limit - above + weight - 1) // tl.maximum(weight, 1), vocab_size)
    is_tie = listed & (key == found)
    token = tl.load(ids + places(LANES, DEPTH), mask=is_tie, other=0)  # too many registers to keep them all
    values = tl.where(is_tie, 2147483647 - token, NOTHING)
    first_id = tl.full((), 2147483647, tl.int32)  # the complement of the first id
    last_id, _above = last_value(
        values, weights, row, keys, ids, listed, size, found, first_id - (vocab_size - 1), first_id,
        tl.zeros((), tl.int64), needed, row_max, scale, False, True, LANES, DEPTH, PIVOTS,
    )  # fmt: skip
    return (found.to(tl.int64) << 32) | last_id.to(tl.int64), needed, listed


@triton.jit
def _prefix_mass(
    key, weights, row, keys, ids, listed, size, last, tie, num_ties, row_max, scale,
    LANES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Mass of the tokens with keys from above ``tie`` up to ``last``, and of ``num_ties`` ties."""
    total = tl.sum(tl.where((key > tie) & (key <= last) & listed, weights, 0), 0)
    for start in range(tl.where(listed, LANES * DEPTH, 0), size, LANES * STREAM):
        other, _token, inside = load_tile(row, keys, ids, listed, start, size, LANES, STREAM)
        total += tl.sum(tl.where((other > tie) & (other <= last) & inside, masses(other, row_max, scale), 0), 0)
    return tl.sum(total) + num_ties * exp2_mass(key_float(tie), row_max, scale)


@triton.jit
def _finish(
    row, row_mass, row_max, scale, top_k, top_p, brackets, sums, keys, ids, vocab_size, BASE_IS_ROW: tl.constexpr,
    LANES: tl.constexpr, DEPTH: tl.constexpr, PIVOTS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The exact threshold of a row, with the first ``LANES * DEPTH`` tokens of its list in registers."""
    top = order_key(row_max)
    row_max = finite(row_max)
    list_size = tl.load(sums + 5)
    place = places(LANES, DEPTH)
    key = tl.load(keys + place, mask=place < tl.minimum(list_size, CAPACITY), other=NOTHING)
    weights = tl.zeros((DEPTH, LANES), tl.int64)
    if top_p < 1.0:
        weights = masses(key, row_max, scale)
    threshold = tl.full((), -9223372036854775808, tl.int64)
    base = row_mass
    if top_k < vocab_size:
        threshold, num_ties, listed = _search(
            key, weights, row, keys, ids, list_size, brackets, tl.load(sums), tl.load(sums + 1), top_k, top,
            row_max, scale, vocab_size, False, CAPACITY, LANES, DEPTH, PIVOTS,
        )  # fmt: skip
        if (top_p < 1.0) & (not BASE_IS_ROW):
            size = tl.where(listed, list_size, vocab_size).to(tl.int32)
            last = tl.where(listed, tl.load(brackets + 1), 2147483647)
            tie = (threshold >> 32).to(tl.int32)
            base = _prefix_mass(
                key, weights, row, keys, ids, listed, size, last, tie, num_ties, row_max, scale, LANES, DEPTH
            )
            base += tl.where(listed, tl.load(sums + 2), 0)
    if top_p < 1.0:
        product = top_p * base.to(tl.float64)
        cut = product.to(tl.int64)
        cut += tl.where(cut.to(tl.float64) < product, 1, 0)
        found, _num_ties, _listed = _search(
            key, weights, row, keys, ids, list_size, brackets + 2, tl.load(sums + 3), tl.load(sums + 4), cut,
            top, row_max, scale, vocab_size, True, CAPACITY, LANES, DEPTH, PIVOTS,
        )  # fmt: skip
        threshold = tl.maximum(threshold, found)
    return threshold


@triton.jit(do_not_specialize=["row_stride", "vocab_size"], do_not_specialize_on_alignment=ANYWHERE)
def _finish_kernel(
    logits, row_stride, row_maxima, row_masses, scales, top_ks, top_ps, pendings, thresholds, brackets, sums, list_keys,
    list_ids, vocab_size, BASE_IS_ROW: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr,
    PIVOTS: tl.constexpr, CAPACITY: tl.constexpr, SUMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The exact threshold of a pending row."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0)
    if tl.load(pendings + index):
        row = logits + index.to(tl.int64) * row_stride
        keys, ids = list_keys + index.to(tl.int64) * CAPACITY, list_ids + index.to(tl.int64) * CAPACITY
        sums += index * SUMS
        brackets += index * 8
        row_mass, row_max, scale = tl.load(row_masses + index), tl.load(row_maxima + index), tl.load(scales + index)
        top_k, top_p = tl.load(top_ks + index), tl.load(top_ps + index)
        if tl.load(sums + 5) <= LANES * DEPTH:
            threshold = _finish(
                row, row_mass, row_max, scale, top_k, top_p, brackets, sums, keys, ids, vocab_size, BASE_IS_ROW, LANES,
                DEPTH, PIVOTS, CAPACITY,
            )  # fmt: skip
        else:
            threshold = _finish(
                row, row_mass, row_max, scale, top_k, top_p, brackets, sums, keys, ids, vocab_size, BASE_IS_ROW, LANES,
                2 * DEPTH, PIVOTS, CAPACITY,
            )  # fmt: skip
        tl.store(thresholds + index, threshold)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The threshold of every row, searching the pending ones; arguments as ``wide.wide_threshold``.

    And what that leaves: brackets int32 ``[R, 8]``, sums int64 ``[R, 8]``, keys and ids of the lists int32 ``[R, n]``.
    """
    num_rows, stride = logits.shape[0], logits.stride(0)
    num_tiles = triton.cdiv(vocab_size, _DEPTH * _LANES)
    tiles = triton.cdiv(num_tiles, min(_MOST_PROGRAMS, max(1, _PROGRAMS // num_rows)))
    thresholds = torch.empty_like(packed)
    brackets, sums = packed.new_empty((num_rows, 8), dtype=torch.int32), packed.new_empty((num_rows, _SUMS))
    keys = packed.new_empty((num_rows, _CAPACITY), dtype=torch.int32)
    ids = torch.empty_like(keys)
    wrap_triton(guess_kernel)[(num_rows,)](
        logits, stride, row_max, row_mass, scale, top_k, top_p, pending, packed, thresholds, brackets, sums, vocab_size,
        BASE_IS_ROW=base_is_row, SAMPLE=_SAMPLE, RUN=_RUN, STEPS=_STEPS, DEVIATIONS=_DEVIATIONS,
        PIVOTS=_PIVOTS, SUMS=_SUMS, FEW=_FEW, num_warps=8, enable_fp_fusion=False, **early(logits.device),
    )  # fmt: skip
    wrap_triton(measure_kernel)[(num_rows, triton.cdiv(num_tiles, tiles))](
        logits, stride, row_max, scale, top_k, top_p, pending, brackets, sums, keys, ids, vocab_size, tiles,
        DEPTH=_DEPTH, LANES=_LANES, CAPACITY=_CAPACITY, SUMS=_SUMS, num_warps=4, enable_fp_fusion=False,
        **early(logits.device),
    )  # fmt: skip
    wrap_triton(_finish_kernel)[(num_rows,)](
        logits, stride, row_max, row_mass, scale, top_k, top_p, pending, thresholds, brackets, sums, keys, ids,
        vocab_size, BASE_IS_ROW=base_is_row, LANES=32 * _WARPS, DEPTH=_RESIDENT, PIVOTS=_PIVOTS, CAPACITY=_CAPACITY,
        SUMS=_SUMS, num_warps=_WARPS, enable_fp_fusion=False, **early(logits.device),
    )  # fmt: skip
    return thresholds, brackets, sums, keys, ids
