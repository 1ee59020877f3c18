"""The wide path on CUDA: a search for the threshold that ``wide.sorted_threshold`` defines, several programs a row.

The hand-written part of the library: fixed torch passes could neither stop early nor skip a row. Three kernels:

1. ``guess_kernel`` brackets the key of each filter's last token by a sample of the row.
2. ``measure_kernel`` reads the row once: the exact weight above either end of a bracket, and a list of what is inside.
3. ``_finish_kernel`` searches the list, by bisection on keys that exist, and cuts ties by id. It searches the row
   itself where the exact weights say that the key is outside, where one key fills the bracket, or where the list was
   too short.

Weights are integers, so programs and atomics may come in any order. They follow ``mass.py`` operation by operation; the
launches turn FMA contraction off.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from compiled_sampler.modes import LARGE_ROWS, row_class
from compiled_sampler.wide_bracket_triton import (
    exp2_mass,
    finite,
    guess_kernel,
    key_float,
    measure_kernel,
    order_key,
)

_SAMPLE, _RUN = 4096, 8  # tokens of a sample, in runs of neighbours
_STEPS = 20  # bisections of the sample: 2**32 keys to 2**12, 1/2048 of a logit
_DEVIATIONS = 4.5  # half of a bracket's width; more makes longer lists, less misses more often
_CAPACITY = 20480  # tokens of a list; a bracket holds about _DEVIATIONS / sqrt(_SAMPLE) of a row at most
_DEPTH, _LANES = 8, 128  # a tile of the measuring pass: tokens a thread, threads
_PROGRAMS, _MOST_PROGRAMS = 24 * 132, 256  # measuring all rows, about, and one row, at most
_SUMS = 8


@triton.jit
def _tile(row, keys, ids, listed, start, stop, TILE: tl.constexpr):
    """Order keys (int64) and ids of a part of the list or of the row, and which of them exist."""
    at = start + tl.arange(0, TILE)
    inside = at < stop
    if listed:
        key = tl.load(keys + at, mask=inside, other=-2147483648)
        token = tl.load(ids + at, mask=inside, other=0)
    else:
        key = order_key(tl.load(row + at, mask=inside, other=float("-inf")).to(tl.float32))
        token = at
    return key.to(tl.int64), token, inside


@triton.jit
def _num_ties(row, keys, ids, listed, start, stop, high, last, TILE: tl.constexpr):
    """Ties at a key whose ids are up to ``last``."""
    ties = tl.zeros((TILE,), tl.int32)
    for at in range(start, stop, TILE):
        key, token, inside = _tile(row, keys, ids, listed, at, stop, TILE)
        ties += ((key == high) & inside & (token <= last)).to(tl.int32)
    return tl.sum(ties).to(tl.int64)


@triton.jit
def _last_tie(row, keys, ids, listed, size, high, needed, vocab_size, TILE: tl.constexpr):
    """The id of a key's tie number ``needed``; V - 1 where there are fewer."""
    start, stop = tl.zeros((), tl.int32), size
    if not listed:  # the tile that the tie is in
        ties = _num_ties(row, keys, ids, listed, start, tl.minimum(TILE, size), high, vocab_size, TILE)
        while (ties < needed) & (start + TILE < size):
            needed -= ties
            start += TILE
            ties = _num_ties(row, keys, ids, listed, start, tl.minimum(start + TILE, size), high, vocab_size, TILE)
        stop = tl.minimum(start + TILE, size)
    ties = tl.zeros((TILE,), tl.int32)
    smallest, largest = tl.full((TILE,), 2147483647, tl.int32), tl.full((TILE,), -1, tl.int32)
    for at in range(start, stop, TILE):
        key, token, inside = _tile(row, keys, ids, listed, at, stop, TILE)
        is_tie = (key == high) & inside
        ties += is_tie.to(tl.int32)
        smallest = tl.minimum(smallest, tl.where(is_tie, token, 2147483647))
        largest = tl.maximum(largest, tl.where(is_tie, token, -1))
    num_ties = tl.sum(ties).to(tl.int64)
    last = tl.where(num_ties < needed, vocab_size - 1, tl.max(largest))  # ties up to this id are enough
    first = tl.where(num_ties <= needed, last - 1, tl.min(smallest) - 1)  # ties up to this id are too few
    while last - first > 1:
        middle = (first + last) >> 1
        enough = _num_ties(row, keys, ids, listed, start, stop, high, middle, TILE) >= needed
        last = tl.where(enough, middle, last)
        first = tl.where(enough, first, middle)
    return last


@triton.jit
def _search(
    row, keys, ids, list_size, top, first, last, above_last, with_first, limit, row_max, scale, vocab_size,
    MASS: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The last packed key with less than ``limit`` weight above it, and whether it was in the list."""
    is_over = above_last >= limit
    is_under = (with_first < limit) & (first > -2147483648) & (above_last < limit)
    listed = (list_size <= CAPACITY) & (first < last) & (is_over | is_under == 0)
    size = tl.where(listed, list_size, vocab_size).to(tl.int32)
    low = tl.where(is_over, last, tl.where(is_under, -2147483649, first - 1))
    high = tl.where(is_over, top, tl.where(is_under, first - 1, last))
    above = tl.where(is_over, 0, tl.where(is_under, with_first, above_last))
    while high - low > 1:  # less than the limit lies above the high key, and not above the low one
        middle = (low + high) >> 1
        total = tl.zeros((TILE,), tl.int64)
        next_above = tl.full((TILE,), 2147483647, tl.int64)
        next_below = tl.full((TILE,), -2147483648, tl.int64)
        for start in range(0, size, TILE):
            key, _, inside = _tile(row, keys, ids, listed, start, size, TILE)
            is_above = (key > middle) & (key <= high) & inside
            if MASS:
                total += tl.where(is_above, exp2_mass(key_float(key.to(tl.int32)), row_max, scale), 0)
            else:
                total += is_above.to(tl.int64)
            next_above = tl.minimum(next_above, tl.where(is_above, key, 2147483647))
            next_below = tl.maximum(next_below, tl.where(key > middle, -2147483648, key))
        found = above + tl.sum(total)
        enough = found >= limit
        low = tl.where(enough, tl.min(next_above) - 1, low)
        high = tl.where(enough, high, tl.maximum(tl.max(next_below), low + 1))
        above = tl.where(enough, above, found)
    weight = tl.full((), 1, tl.int64)
    if MASS:
        weight = exp2_mass(key_float(high.to(tl.int32)), row_max, scale)
    needed = tl.where(weight > 0, (limit - above + weight - 1) // tl.maximum(weight, 1), vocab_size)
    last_id = _last_tie(row, keys, ids, listed, size, high, needed, vocab_size, TILE)
    return (high << 32) | (2147483647 - last_id).to(tl.int64), listed


@triton.jit
def _prefix_mass(row, keys, ids, listed, size, last, threshold, row_max, scale, TILE: tl.constexpr):
    """Mass of the tokens, up to the key ``last``, whose packed key reaches the threshold."""
    total = tl.zeros((TILE,), tl.int64)
    for start in range(0, size, TILE):
        key, token, inside = _tile(row, keys, ids, listed, start, size, TILE)
        packed = (key << 32) | (2147483647 - token).to(tl.int64)
        chosen = (packed >= threshold) & (key <= last) & inside
        total += tl.where(chosen, exp2_mass(key_float(key.to(tl.int32)), row_max, scale), 0)
    return tl.sum(total)


@triton.jit(
    do_not_specialize=["row_stride", "vocab_size"],
    do_not_specialize_on_alignment=[
        "logits",
        "row_maxima",
        "row_masses",
        "scales",
        "top_ks",
        "top_ps",
        "pendings",
        "thresholds",
    ],
)
def _finish_kernel(
    logits, row_stride, row_maxima, row_masses, scales, top_ks, top_ps, pendings, thresholds, brackets, sums, list_keys,
    list_ids, vocab_size, BASE_IS_ROW: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """The exact threshold of a pending row."""
    index = tl.program_id(0)
    if tl.load(pendings + index):
        row = logits + index.to(tl.int64) * row_stride
        keys, ids = list_keys + index.to(tl.int64) * CAPACITY, list_ids + index.to(tl.int64) * CAPACITY
        sums += index * SUMS
        brackets += index * 4
        scale = tl.load(scales + index)
        top_k = tl.load(top_ks + index)
        top_p = tl.load(top_ps + index)
        row_max = tl.load(row_maxima + index)
        top = order_key(row_max).to(tl.int64)
        row_max = finite(row_max)
        list_size = tl.load(sums + 5)
        threshold = tl.full((), -9223372036854775808, tl.int64)
        base = tl.load(row_masses + index)
        if top_k < vocab_size:
            first, last = tl.load(brackets).to(tl.int64), tl.load(brackets + 1).to(tl.int64)
            threshold, listed = _search(
                row, keys, ids, list_size, top, first, last, tl.load(sums), tl.load(sums + 1), top_k, row_max, scale,
                vocab_size, False, TILE, CAPACITY,
            )  # fmt: skip
            if (top_p < 1.0) & (not BASE_IS_ROW):
                size = tl.where(listed, list_size, vocab_size).to(tl.int32)
                last = tl.where(listed, last, 2147483647)
                base = _prefix_mass(row, keys, ids, listed, size, last, threshold, row_max, scale, TILE)
                base += tl.where(listed, tl.load(sums + 2), 0)
        if top_p < 1.0:
            product = top_p * base.to(tl.float64)
            cut = product.to(tl.int64)
            cut += tl.where(cut.to(tl.float64) < product, 1, 0)
            first, last = tl.load(brackets + 2).to(tl.int64), tl.load(brackets + 3).to(tl.int64)
            found, _ = _search(
                row, keys, ids, list_size, top, first, last, tl.load(sums + 3), tl.load(sums + 4), cut, row_max, scale,
                vocab_size, True, TILE, CAPACITY,
            )  # fmt: skip
            threshold = tl.maximum(threshold, found)
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
) -> Tensor:
    """The threshold of every row, searching the pending ones; arguments as ``wide.wide_threshold``."""
    num_rows, stride = logits.shape[0], logits.stride(0)
    num_tiles = triton.cdiv(vocab_size, _DEPTH * _LANES)
    tiles = triton.cdiv(num_tiles, min(_MOST_PROGRAMS, max(1, _PROGRAMS // num_rows)))
    thresholds = torch.empty_like(packed)
    brackets, sums = packed.new_empty((num_rows, 4), dtype=torch.int32), packed.new_empty((num_rows, _SUMS))
    keys = packed.new_empty((num_rows, _CAPACITY), dtype=torch.int32)
    ids = torch.empty_like(keys)
    wrap_triton(guess_kernel)[(num_rows,)](
        logits, stride, row_max, row_mass, scale, top_k, top_p, pending, packed, thresholds, brackets, sums, vocab_size,
        BASE_IS_ROW=base_is_row, SAMPLE=_SAMPLE, RUN=_RUN, STEPS=_STEPS, DEVIATIONS=_DEVIATIONS, SUMS=_SUMS,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    wrap_triton(measure_kernel)[(num_rows, triton.cdiv(num_tiles, tiles))](
        logits, stride, row_max, scale, top_k, top_p, pending, brackets, sums, keys, ids, vocab_size, tiles,
        DEPTH=_DEPTH, LANES=_LANES, CAPACITY=_CAPACITY, SUMS=_SUMS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    num_warps = 8 if row_class(num_rows, logits.device) == LARGE_ROWS else 16  # few rows leave a multiprocessor each
    wrap_triton(_finish_kernel)[(num_rows,)](
        logits, stride, row_max, row_mass, scale, top_k, top_p, pending, thresholds, brackets, sums, keys, ids,
        vocab_size, BASE_IS_ROW=base_is_row, TILE=256 * num_warps, CAPACITY=_CAPACITY, SUMS=_SUMS, num_warps=num_warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return thresholds
