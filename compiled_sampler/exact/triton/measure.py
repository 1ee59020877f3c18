"""The pass over a row that is searched, on CUDA: exact weights around the brackets, and what is inside."""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.exact.triton.rows import (
    BRACKET_FIELDS,
    BRACKET_FIRST,
    BRACKET_LAST,
    FEW_ABOVE,
    FLOAT_MAX_KEY,
    HIGHEST_KEY,
    ID_MASK,
    IS_OPEN,
    LIST_SIZE,
    MASS_AFTER_WINNER,
    SPARE,
    SUM_FIELDS,
    TOP_K_BRACKET,
    TOP_K_MASS_ABOVE,
    TOP_K_TOKENS,
    TOP_P_BRACKET,
    TOP_P_MASS,
    WEIGHT_ABOVE,
    WEIGHT_WITH,
    WINNER_KEY,
    exp2_mass,
    finite,
    kernel,
    key_float,
    last_look,
    list_of,
    load_tile_words,
    order_key,
    unmasked,
    write_entries,
)


@triton.jit
def _append(listed, list_size, x, ids, is_listed, lane_size, CAPACITY: tl.constexpr):
    """Put tokens of a tile into the row's list; ``lane_size`` of them are each thread's."""
    # A program asks for room once a tile: threads that each ask would wait for each other at the row's counter.
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
def _load_bracket(bracket):
    """First and last key of a filter's bracket."""
    return tl.load(bracket + BRACKET_FIRST), tl.load(bracket + BRACKET_LAST)


@triton.jit
def _bounds(brackets, use_p, FIRST_PASS: tl.constexpr):
    """The logits that part a row's tokens, by filter; that of its winner; and whether the list is to hold all above."""
    # A filter's are (from_first, above_last, list_from, list_to): from the first its bracket begins, above the second
    # it has ended, and from the third to the fourth its tokens are listed.
    first_k, last_k = _load_bracket(brackets + TOP_K_BRACKET)
    first_p, last_p = _load_bracket(brackets + TOP_P_BRACKET)
    from_k, above_last_k = _float_from(first_k), _float_above(last_k)
    from_p, above_last_p = _float_from(first_p), _float_above(last_p)
    nothing = _float_from(HIGHEST_KEY)
    # brackets of one key need no list; the first pass counts what it lists, so it lists that too
    list_k = from_k if FIRST_PASS else tl.where(first_k < last_k, from_k, nothing)
    list_p = tl.where(first_p < last_p, from_p, nothing)
    with_above = tl.load(brackets + FEW_ABOVE) == 1  # then the race needs nothing but the list
    end_k = tl.where(with_above & (use_p == 0), nothing, above_last_k)
    end_p = tl.where(with_above & use_p, nothing, above_last_p)
    winner_logit = key_float(tl.load(brackets + WINNER_KEY))
    return (from_k, above_last_k, list_k, end_k), (from_p, above_last_p, list_p, end_p), winner_logit, with_above


@triton.jit
def _add(
    totals, x, word, ids, bounds, listed, list_size, row, CAPACITY: tl.constexpr, FIRST_PASS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add a tile to each thread's totals, and to the list; ``bounds`` as ``_bounds``, ``row`` as ``_measure``."""
    above_k, with_k, mass_k, mass_p, with_p, mass_after, largest, sizes = totals
    of_k, of_p, winner_logit, _with_above = bounds
    row_max, scale, use_k, use_p = row
    from_k, above_last_k, list_k, end_k = of_k
    from_p, above_last_p, list_p, end_p = of_p
    x = x.to(tl.float32)
    if MASKED:
        x = unmasked(x, word, tl.arange(0, x.shape[0])[:, None])
    if FIRST_PASS:
        largest = tl.maximum(largest, tl.max(x, 1))
        sizes += tl.sum(tl.abs(x), 1)
    is_listed = (x >= list_k) & ((x > end_k) == 0)  # no masked token is: brackets begin above them
    if not FIRST_PASS:
        is_listed = is_listed | ((x >= list_p) & ((x > end_p) == 0))
    lane_size = tl.sum(is_listed.to(tl.int32), 1)
    if use_k:
        above_k += _count(x > above_last_k)
        with_k += lane_size.to(tl.float32) if FIRST_PASS else _count(x >= from_k)
    if use_p:
        weight = exp2_mass(x, row_max, scale)
        if use_k:
            mass_k += tl.sum(tl.where(x > above_last_k, weight, 0), 1)
        mass_p += tl.sum(tl.where(x > above_last_p, weight, 0), 1)
        with_p += tl.sum(tl.where(x >= from_p, weight, 0), 1)
        mass_after += tl.sum(tl.where(x < winner_logit, weight, 0), 1)
    _append(listed, list_size, x, ids, is_listed, lane_size, CAPACITY)
    return above_k, with_k, mass_k, mass_p, with_p, mass_after, largest, sizes


@triton.jit
def _load_words(words, at, left, DEPTH: tl.constexpr, LANES: tl.constexpr, MASKED: tl.constexpr):
    """The words of a tile's tokens, int32 ``[1, DEPTH]``, a bit for each lane; of a full tile ``left`` is None."""
    depth = tl.arange(0, DEPTH)[None, :]
    word = depth * 0
    if MASKED:
        tl.static_assert(LANES == 32)
        word = load_tile_words(words, at, depth, left)
    return word


@triton.jit
def _measure(
    logits, words, brackets, sums, listed, row, vocab_size, start, tiles,
    DEPTH: tl.constexpr, LANES: tl.constexpr, CAPACITY: tl.constexpr, FIRST_PASS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add a part of a row to its sums and its list; the largest logit and ``nan_bits`` of the part."""
    # row is (row_max, scale, use_k, use_p): the finite maximum, and which filters are on. Logits are compared as
    # floats, which a NaN fails, and not as order keys, which take six instructions each.
    _row_max, _scale, use_k, use_p = row
    bounds = _bounds(brackets, use_p, FIRST_PASS)
    _of_k, _of_p, _winner_logit, with_above = bounds
    SIZE: tl.constexpr = DEPTH * LANES
    number = tl.arange(0, LANES)[:, None] + tl.arange(0, DEPTH)[None, :] * LANES  # a thread holds a row of it
    no_count, no_mass = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.int64)
    lowest = tl.full((LANES,), float("-inf"), tl.float32)
    totals = (no_count, no_count, no_mass, no_mass, no_mass, no_mass, lowest, no_count)
    at = start * SIZE
    full_tiles = tl.minimum(tiles, vocab_size // SIZE - start)  # all but the last one of a row: no token is checked
    if full_tiles > 0:
        last = at + (full_tiles - 1) * SIZE
        x = tl.load(logits + at + number, eviction_policy="evict_first")
        word = _load_words(words, at, None, DEPTH, LANES, MASKED)
        for _ in range(full_tiles):
            after = tl.minimum(at + SIZE, last)
            next_x = tl.load(logits + after + number, eviction_policy="evict_first")  # while this one is used
            next_word = _load_words(words, after, None, DEPTH, LANES, MASKED)
            totals = _add(
                totals, x, word, at + number, bounds, listed, sums + LIST_SIZE, row, CAPACITY, FIRST_PASS, MASKED
            )
            x, word = next_x, next_word
            at += SIZE
    if full_tiles < tiles:
        x = last_look(logits + at + number, number < vocab_size - at)
        word = _load_words(words, at, vocab_size - at, DEPTH, LANES, MASKED)
        totals = _add(totals, x, word, at + number, bounds, listed, sums + LIST_SIZE, row, CAPACITY, FIRST_PASS, MASKED)
    above_k, with_k, mass_k, mass_p, with_p, mass_after, largest, sizes = totals
    if use_k:
        if FIRST_PASS:
            with_k += tl.where(with_above, 0.0, above_k)  # so far what is listed
        tl.atomic_add(sums + TOP_K_TOKENS + WEIGHT_ABOVE, tl.sum(above_k.to(tl.int32)).to(tl.int64), sem="relaxed")
        tl.atomic_add(sums + TOP_K_TOKENS + WEIGHT_WITH, tl.sum(with_k.to(tl.int32)).to(tl.int64), sem="relaxed")
    if use_p:
        tl.atomic_add(sums + TOP_K_MASS_ABOVE, tl.sum(mass_k), sem="relaxed")
        tl.atomic_add(sums + TOP_P_MASS + WEIGHT_ABOVE, tl.sum(mass_p), sem="relaxed")
        tl.atomic_add(sums + TOP_P_MASS + WEIGHT_WITH, tl.sum(with_p), sem="relaxed")
        tl.atomic_add(sums + MASS_AFTER_WINNER, tl.sum(mass_after), sem="relaxed")
    any_nan = tl.max((sizes != sizes).to(tl.int32))  # a sum of sizes is a NaN if one of them is, and in no other case
    return tl.max(largest), any_nan * ID_MASK


@kernel
def measure_kernel(
    logits, row_stride, words, word_stride, row_maxima, nan_bits, scales, top_ks, top_ps, brackets, sums, lists,
    open_rows, num_rows, vocab_size, ALL_ROWS: tl.constexpr, FIRST_PASS: tl.constexpr, DEPTH: tl.constexpr,
    LANES: tl.constexpr, CAPACITY: tl.constexpr, STRIDE: tl.constexpr, MASKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The exact weights around the brackets of open rows, added up, and the tokens inside, and above if they are few.

    Reads:
        logits ``[R, >=V]``, ``row_stride`` numbers a row, each once, and with MASKED their words, as ``race_kernel``.
        Each row's row_maxima, scales, top_ks, top_ps ``[R]`` and brackets; open_rows, unless ALL_ROWS.
    Writes:
        sums: all fields, on top of the zeros of ``bracket_kernel``.
        lists: int64 ``[R, STRIDE]``, entries in any order.
        With FIRST_PASS also row_maxima, the largest logit, and nan_bits, as ``maxima.nan_bits_of``.
    Grid:
        ``(n,)``, any number: each program takes as many tiles of DEPTH * LANES tokens, one after the other, which may
        be of several rows.
    Flags:
        ALL_ROWS: look at every row, and measure those that are open; else at those that open_rows names.
        FIRST_PASS: as ``bracket_kernel``; masses have no meaning yet.
        CAPACITY, STRIDE: entries of a list, and from list to list.
        MASKED: tokens whose bit is 0 count as -inf.
        EARLY: starts while the kernel before ends, and waits for that end.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row_tiles = tl.cdiv(vocab_size, DEPTH * LANES)
    if not ALL_ROWS:
        num_rows = tl.load(open_rows)
    tiles = tl.cdiv(num_rows * row_tiles, tl.num_programs(0))
    tile = tl.program_id(0) * tiles
    stop = tl.minimum(tile + tiles, num_rows * row_tiles)
    while tile < stop:
        index = tile // row_tiles
        start = tile - index * row_tiles
        tiles = tl.minimum(stop - tile, row_tiles - start)
        tile += tiles
        if not ALL_ROWS:
            index = tl.load(open_rows + 1 + index)
        if tl.load(brackets + index * BRACKET_FIELDS + IS_OPEN) == 1:
            row = logits + index.to(tl.int64) * row_stride
            row_max = finite(tl.load(row_maxima + index))  # in the first pass not known yet, and not used
            scale, use_k = tl.load(scales + index), tl.load(top_ks + index) < vocab_size
            use_p = (tl.load(top_ps + index) < 1.0) & (not FIRST_PASS)
            largest, part_nan_bits = _measure(
                row, words + index.to(tl.int64) * word_stride, brackets + index * BRACKET_FIELDS,
                sums + index * SUM_FIELDS, list_of(lists, index, STRIDE), (row_max, scale, use_k, use_p), vocab_size,
                start, tiles, DEPTH, LANES, CAPACITY, FIRST_PASS, MASKED,
            )  # fmt: skip
            if FIRST_PASS:
                tl.atomic_max(row_maxima + index, key_float(order_key(largest)), sem="relaxed")  # 0 for -0
                tl.atomic_max(nan_bits + index, part_nan_bits, sem="relaxed")
