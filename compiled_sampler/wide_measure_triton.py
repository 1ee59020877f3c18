"""The pass over the row of the wide path on CUDA: exact weights around the brackets, and what is inside."""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.wide_keys_triton import ANY_NUMBER, ANYWHERE, exp2_mass, finite, key_float, last_look, order_key


@triton.jit
def _append(row_keys, row_ids, list_sizes, key, ids, is_listed, CAPACITY: tl.constexpr):
    """Put tokens of a tile into the row's list."""
    chosen = is_listed.to(tl.int32)
    lane_size = tl.sum(chosen, 1)
    # a thread makes room for its own: few have any, and threads that count together wait for each other
    place = tl.atomic_add(list_sizes, lane_size.to(tl.int64), mask=lane_size > 0, sem="relaxed").to(tl.int32)
    at = place[:, None] + tl.cumsum(chosen, 1) - chosen
    fits = (chosen > 0) & (at < CAPACITY)
    tl.store(row_keys + at, key, mask=fits)
    tl.store(row_ids + at, ids, mask=fits)


@triton.jit
def _measure(
    row, brackets, sums, row_keys, row_ids, row_max, scale, use_k, use_p, vocab_size, start, tiles,
    DEPTH: tl.constexpr, LANES: tl.constexpr, CAPACITY: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Add a part of a row to its sums and its list; the largest order key and ``nan_bits`` of the part."""
    first_k, last_k = tl.load(brackets), tl.load(brackets + 1)
    first_p, last_p = tl.load(brackets + 2), tl.load(brackets + 3)
    list_k = tl.where(first_k < last_k, first_k, 2147483647)
    list_p = tl.where(first_p < last_p, first_p, 2147483647)
    with_above = tl.load(brackets + 4) == 1  # then the race needs nothing but the list
    end_k = tl.where(with_above & (use_p == 0), 2147483647, last_k)
    end_p = tl.where(with_above & use_p, 2147483647, last_p)
    its = tl.load(brackets + 6)
    number = tl.arange(0, LANES)[:, None] + tl.arange(0, DEPTH)[None, :] * LANES  # a thread holds a row of it
    above_k, with_k = tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32)
    mass_k, mass_p = tl.zeros((LANES,), tl.int64), tl.zeros((LANES,), tl.int64)
    with_p, mass_after = tl.zeros((LANES,), tl.int64), tl.zeros((LANES,), tl.int64)
    largest, magnitude = tl.full((LANES,), -2147483648, tl.int32), tl.zeros((LANES,), tl.int32)
    list_sizes = sums + 5 + tl.zeros((LANES,), tl.int32)
    ids = start * (DEPTH * LANES) + number
    x = last_look(row + ids, ids < vocab_size)
    for _ in range(tiles):
        next_ids = ids + DEPTH * LANES
        next_x = last_look(row + next_ids, next_ids < vocab_size)  # while this one is used
        x = x.to(tl.float32)
        key = order_key(x)
        if FIRST:
            largest = tl.maximum(largest, tl.max(key, 1))
            magnitude = tl.maximum(magnitude, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
        if use_k:
            above_k += tl.sum((key > last_k).to(tl.int32), 1)
            with_k += tl.sum((key >= first_k).to(tl.int32), 1)
        if use_p:
            weight = exp2_mass(x, row_max, scale)
            if use_k:
                mass_k += tl.sum(tl.where(key > last_k, weight, 0), 1)
            mass_p += tl.sum(tl.where(key > last_p, weight, 0), 1)
            with_p += tl.sum(tl.where(key >= first_p, weight, 0), 1)
            mass_after += tl.sum(tl.where(key < its, weight, 0), 1)
        is_listed = (key >= list_k) & (key <= end_k)  # no masked token is: brackets begin above them
        if not FIRST:
            is_listed = is_listed | ((key >= list_p) & (key <= end_p))
        _append(row_keys, row_ids, list_sizes, key, ids, is_listed, CAPACITY)
        x = next_x
        ids = next_ids
    if use_k:
        tl.atomic_add(sums, tl.sum(above_k).to(tl.int64), sem="relaxed")
        tl.atomic_add(sums + 1, tl.sum(with_k).to(tl.int64), sem="relaxed")
    if use_p:
        tl.atomic_add(sums + 2, tl.sum(mass_k), sem="relaxed")
        tl.atomic_add(sums + 3, tl.sum(mass_p), sem="relaxed")
        tl.atomic_add(sums + 4, tl.sum(with_p), sem="relaxed")
        tl.atomic_add(sums + 6, tl.sum(mass_after), sem="relaxed")
    return tl.max(largest), tl.max(magnitude)


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANYWHERE)
def measure_kernel(
    logits, row_stride, row_maxima, magnitudes, scales, top_ks, top_ps, brackets, sums, list_keys, list_ids, open_rows,
    num_rows, vocab_size, ALL: tl.constexpr, FIRST: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr,
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
                row, brackets + index * 8, sums + index * SUMS, list_keys + index.to(tl.int64) * CAPACITY,
                list_ids + index.to(tl.int64) * CAPACITY, row_max, tl.load(scales + index),
                tl.load(top_ks + index) < vocab_size, (tl.load(top_ps + index) < 1.0) & (not FIRST), vocab_size, start,
                tiles, DEPTH, LANES, CAPACITY, FIRST,
            )  # fmt: skip
            if FIRST:
                tl.atomic_max(row_maxima + index, key_float(largest), sem="relaxed")
                tl.atomic_max(magnitudes + index, magnitude, sem="relaxed")
