"""The pass over the row of the wide path on CUDA: exact weights around the brackets, and what is inside."""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.exact.triton.keys import (
    ANY_NUMBER,
    ANYWHERE,
    FLOAT_MAX_KEY,
    exp2_mass,
    finite,
    key_float,
    last_look,
    order_key,
)
from compiled_sampler.exact.triton.token_list import SPARE, list_of, write_entries


@triton.jit
def _append(listed, list_size, x, ids, is_listed, lane_size, CAPACITY: tl.constexpr):
    """Put tokens of a tile into the row's list; ``lane_size`` of them are each thread's.

    A program asks for room once a tile: threads that each ask would wait for each other at the row's counter.
    """
    tl.static_assert(is_listed.shape[0] * is_listed.shape[1] <= SPARE)
    chosen = is_listed.to(tl.int32)
    size = tl.sum(lane_size)
    if size > 0:
        place = tl.atomic_add(list_size, size.to(tl.int64), sem="relaxed").to(tl.int32)
        lane_at = tl.minimum(place, CAPACITY) + tl.cumsum(lane_size, 0) - lane_size
        write_entries(listed, lane_at[:, None] + tl.cumsum(chosen, 1) - chosen, x, ids, is_listed)


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
def _bounds(brackets, use_p, FIRST: tl.constexpr):
    """The logits that part a row's tokens, by filter, and the winner's; and whether few tokens are above a bracket.

    Brackets: from the first, above the last. Lists: from the third, up to the fourth.
    """
    first_k, last_k = tl.load(brackets), tl.load(brackets + 1)
    first_p, last_p = tl.load(brackets + 2), tl.load(brackets + 3)
    from_k, above_last_k = _float_from(first_k), _float_above(last_k)
    from_p, above_last_p = _float_from(first_p), _float_above(last_p)
    nothing = _float_from(2147483647)
    # brackets of one key need no list; FIRST counts what it lists, so it lists that too
    list_k = from_k if FIRST else tl.where(first_k < last_k, from_k, nothing)
    list_p = tl.where(first_p < last_p, from_p, nothing)
    with_above = tl.load(brackets + 4) == 1  # then the race needs nothing but the list
    end_k = tl.where(with_above & (use_p == 0), nothing, above_last_k)
    end_p = tl.where(with_above & use_p, nothing, above_last_p)
    its = key_float(tl.load(brackets + 6))
    return (from_k, above_last_k, list_k, end_k), (from_p, above_last_p, list_p, end_p), its, with_above


@triton.jit
def _add(
    totals, x, ids, of_k, of_p, its, listed, list_size, row_max, scale, use_k, use_p,
    CAPACITY: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Add a tile to each thread's totals, and to the list."""
    above_k, with_k, mass_k, mass_p, with_p, mass_after, largest, sizes = totals
    from_k, above_last_k, list_k, end_k = of_k
    from_p, above_last_p, list_p, end_p = of_p
    x = x.to(tl.float32)
    if FIRST:
        largest = tl.maximum(largest, tl.max(x, 1))
        sizes += tl.sum(tl.abs(x), 1)
    is_listed = (x >= list_k) & ((x > end_k) == 0)  # no masked token is: brackets begin above them
    if not FIRST:
        is_listed = is_listed | ((x >= list_p) & ((x > end_p) == 0))
    lane_size = tl.sum(is_listed.to(tl.int32), 1)
    if use_k:
        above_k += _count(x > above_last_k)
        with_k += lane_size.to(tl.float32) if FIRST else _count(x >= from_k)
    if use_p:
        weight = exp2_mass(x, row_max, scale)
        if use_k:
            mass_k += tl.sum(tl.where(x > above_last_k, weight, 0), 1)
        mass_p += tl.sum(tl.where(x > above_last_p, weight, 0), 1)
        with_p += tl.sum(tl.where(x >= from_p, weight, 0), 1)
        mass_after += tl.sum(tl.where(x < its, weight, 0), 1)
    _append(listed, list_size, x, ids, is_listed, lane_size, CAPACITY)
    return above_k, with_k, mass_k, mass_p, with_p, mass_after, largest, sizes


@triton.jit
def _measure(
    row, brackets, sums, listed, row_max, scale, use_k, use_p, vocab_size, start, tiles,
    DEPTH: tl.constexpr, LANES: tl.constexpr, CAPACITY: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Add a part of a row to its sums and its list; the largest logit and ``nan_bits`` of the part.

    Logits are compared as floats, which a NaN fails, and not as order keys, which take six instructions each.
    """
    of_k, of_p, its, with_above = _bounds(brackets, use_p, FIRST)
    SIZE: tl.constexpr = DEPTH * LANES
    number = tl.arange(0, LANES)[:, None] + tl.arange(0, DEPTH)[None, :] * LANES  # a thread holds a row of it
    no_count, no_mass = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.int64)
    lowest = tl.full((LANES,), float("-inf"), tl.float32)
    totals = (no_count, no_count, no_mass, no_mass, no_mass, no_mass, lowest, no_count)
    at = start * SIZE
    full_tiles = tl.minimum(tiles, vocab_size // SIZE - start)  # all but the last one of a row: no token is checked
    if full_tiles > 0:
        last = at + (full_tiles - 1) * SIZE
        x = tl.load(row + at + number, eviction_policy="evict_first")
        for _ in range(full_tiles):
            after = tl.minimum(at + SIZE, last)
            next_x = tl.load(row + after + number, eviction_policy="evict_first")  # while this one is used
            totals = _add(
                totals, x, at + number, of_k, of_p, its, listed, sums + 5, row_max, scale, use_k, use_p,
                CAPACITY, FIRST,
            )  # fmt: skip
            x = next_x
            at += SIZE
    if full_tiles < tiles:
        x = last_look(row + at + number, number < vocab_size - at)
        totals = _add(
            totals, x, at + number, of_k, of_p, its, listed, sums + 5, row_max, scale, use_k, use_p, CAPACITY, FIRST
        )
    above_k, with_k, mass_k, mass_p, with_p, mass_after, largest, sizes = totals
    if use_k:
        if FIRST:
            with_k += tl.where(with_above, 0.0, above_k)  # so far what is listed
        tl.atomic_add(sums, tl.sum(above_k.to(tl.int32)).to(tl.int64), sem="relaxed")
        tl.atomic_add(sums + 1, tl.sum(with_k.to(tl.int32)).to(tl.int64), sem="relaxed")
    if use_p:
        tl.atomic_add(sums + 2, tl.sum(mass_k), sem="relaxed")
        tl.atomic_add(sums + 3, tl.sum(mass_p), sem="relaxed")
        tl.atomic_add(sums + 4, tl.sum(with_p), sem="relaxed")
        tl.atomic_add(sums + 6, tl.sum(mass_after), sem="relaxed")
    any_nan = tl.max((sizes != sizes).to(tl.int32))  # a sum of sizes is a NaN if one of them is, and in no other case
    return tl.max(largest), any_nan * 0x7FFFFFFF


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
