"""The pass over the row of the wide path on CUDA: exact weights around the brackets, and what is inside."""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.wide_keys_triton import (
    ANY_NUMBER,
    ANYWHERE,
    FLOAT_MAX_KEY,
    exp2_mass,
    finite,
    key_float,
    last_look,
    order_key,
)
from compiled_sampler.wide_list_triton import SPARE, list_of, write_entries


@triton.jit
def _append(listed, list_size, x, ids, is_listed, CAPACITY: tl.constexpr):
    """Put tokens of a tile into the row's list.

    A program asks for room once a tile: threads that each ask would wait for each other at the row's counter.
    """
    tl.static_assert(is_listed.shape[0] * is_listed.shape[1] <= SPARE)
    chosen = is_listed.to(tl.int32)
    lane_size = tl.sum(chosen, 1)
    size = tl.sum(lane_size)
    if size > 0:
        place = tl.atomic_add(list_size, size.to(tl.int64), sem="relaxed").to(tl.int32)
        lane_at = tl.minimum(place, CAPACITY) + tl.cumsum(lane_size, 0) - lane_size
        write_entries(listed, lane_at[:, None] + tl.cumsum(chosen, 1) - chosen, x, ids, is_listed)


@triton.jit
def _logits(row, at, number, vocab_size, SIZE: tl.constexpr):
    """A tile of a row, which only its last one checks token by token."""
    if at + SIZE <= vocab_size:
        x = tl.load(row + at + number, eviction_policy="evict_first")
    else:
        x = last_look(row + at + number, number < vocab_size - at)
    return x


@triton.jit
def _count(is_counted):
    """How many of a thread's tokens are, as float32: two instructions a token, three or four as integers."""
    return tl.sum(is_counted.to(tl.float32), 1)


@triton.jit
def _float_from(key):
    """The float from which on logits are in a bracket, NaN if none is; never a masked one."""
    return key_float(tl.maximum(key, -FLOAT_MAX_KEY))


@triton.jit
def _float_above(key):
    """The float above which logits are above a key, NaN if none is."""
    return key_float(tl.maximum(key, -FLOAT_MAX_KEY - 1))


@triton.jit
def _measure(
    row, brackets, sums, listed, row_max, scale, use_k, use_p, vocab_size, start, tiles,
    DEPTH: tl.constexpr, LANES: tl.constexpr, CAPACITY: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Add a part of a row to its sums and its list; the largest logit and ``nan_bits`` of the part.

    Logits are compared as floats, which a NaN fails, and not as order keys, which take six instructions each.
    """
    first_k, last_k = tl.load(brackets), tl.load(brackets + 1)
    first_p, last_p = tl.load(brackets + 2), tl.load(brackets + 3)
    from_k, above_last_k = _float_from(first_k), _float_above(last_k)
    from_p, above_last_p = _float_from(first_p), _float_above(last_p)
    nothing = _float_from(2147483647)
    list_k, list_p = tl.where(first_k < last_k, from_k, nothing), tl.where(first_p < last_p, from_p, nothing)
    with_above = tl.load(brackets + 4) == 1  # then the race needs nothing but the list
    end_k = tl.where(with_above & (use_p == 0), nothing, above_last_k)
    end_p = tl.where(with_above & use_p, nothing, above_last_p)
    its = key_float(tl.load(brackets + 6))
    number = tl.arange(0, LANES)[:, None] + tl.arange(0, DEPTH)[None, :] * LANES  # a thread holds a row of it
    above_k, with_k = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    mass_k, mass_p = tl.zeros((LANES,), tl.int64), tl.zeros((LANES,), tl.int64)
    with_p, mass_after = tl.zeros((LANES,), tl.int64), tl.zeros((LANES,), tl.int64)
    largest, magnitude = tl.full((LANES,), float("-inf"), tl.float32), tl.zeros((LANES,), tl.int32)
    at = start * (DEPTH * LANES)
    x = _logits(row, at, number, vocab_size, DEPTH * LANES)
    for _ in range(tiles):
        after = at + DEPTH * LANES
        next_x = _logits(row, after, number, vocab_size, DEPTH * LANES)  # while this one is used
        x = x.to(tl.float32)
        if FIRST:
            largest = tl.maximum(largest, tl.max(x, 1))
            magnitude = tl.maximum(magnitude, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
        if use_k:
            above_k += _count(x > above_last_k)
            with_k += _count(x >= from_k)
        if use_p:
            weight = exp2_mass(x, row_max, scale)
            if use_k:
                mass_k += tl.sum(tl.where(x > above_last_k, weight, 0), 1)
            mass_p += tl.sum(tl.where(x > above_last_p, weight, 0), 1)
            with_p += tl.sum(tl.where(x >= from_p, weight, 0), 1)
            mass_after += tl.sum(tl.where(x < its, weight, 0), 1)
        is_listed = (x >= list_k) & ((x > end_k) == 0)  # no masked token is: brackets begin above them
        if not FIRST:
            is_listed = is_listed | ((x >= list_p) & ((x > end_p) == 0))
        _append(listed, sums + 5, x, at + number, is_listed, CAPACITY)
        x = next_x
        at = after
    if use_k:
        tl.atomic_add(sums, tl.sum(above_k.to(tl.int32)).to(tl.int64), sem="relaxed")
        tl.atomic_add(sums + 1, tl.sum(with_k.to(tl.int32)).to(tl.int64), sem="relaxed")
    if use_p:
        tl.atomic_add(sums + 2, tl.sum(mass_k), sem="relaxed")
        tl.atomic_add(sums + 3, tl.sum(mass_p), sem="relaxed")
        tl.atomic_add(sums + 4, tl.sum(with_p), sem="relaxed")
        tl.atomic_add(sums + 6, tl.sum(mass_after), sem="relaxed")
    return tl.max(largest), tl.max(magnitude)


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANYWHERE)
def measure_kernel(
    logits, row_stride, row_maxima, magnitudes, scales, top_ks, top_ps, brackets, sums, lists, open_rows, num_rows,
    vocab_size, ALL: tl.constexpr, FIRST: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr,
    CAPACITY: tl.constexpr, SUMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add a part of the open rows to their sums, and to their lists the tokens inside brackets, and few above.

    Sums: tokens above top-k's bracket, and with it; mass above top-k's bracket, above top-p's, and with it; list size;
    mass behind the token that has won a race. With ``FIRST``, where there are no masses, the row's maximum and NaN too.
    With ``ALL`` every row is looked at; else the listed ones. A program's part may be of several rows.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row_tiles = tl.cdiv(vocab_size, DEPTH * LANES)
    if not ALL:
        num_rows = tl.load(open_rows)
    tiles = tl.cdiv(num_rows * row_tiles, tl.num_programs(0))
    tile = tl.program_id(0) * tiles
    stop = tl.minimum(tile + tiles, num_rows * row_tiles)
    while tile < stop:
        index = tile // row_tiles
        start = tile - index * row_tiles
        tiles = tl.minimum(stop - tile, row_tiles - start)
        tile += tiles
        if not ALL:
            index = tl.load(open_rows + 1 + index)
        if tl.load(brackets + index * 8 + 5) == 1:
            row = logits + index.to(tl.int64) * row_stride
            row_max = finite(tl.load(row_maxima + index))  # with FIRST not known yet, and of no use
            largest, magnitude = _measure(
                row, brackets + index * 8, sums + index * SUMS, list_of(lists, index, CAPACITY), row_max,
                tl.load(scales + index), tl.load(top_ks + index) < vocab_size,
                (tl.load(top_ps + index) < 1.0) & (not FIRST), vocab_size, start, tiles, DEPTH, LANES, CAPACITY, FIRST,
            )  # fmt: skip
            if FIRST:
                tl.atomic_max(row_maxima + index, key_float(order_key(largest)), sem="relaxed")  # 0 for -0
                tl.atomic_max(magnitudes + index, magnitude, sem="relaxed")
