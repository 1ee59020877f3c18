"""The last part of the search on CUDA: a row's exact threshold, searched in its list, or the winner under it.

``lists`` of a row is ``(row, listed, list_size)``: its ``(logits, words)``, its list, and how many tokens belong in
that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.exact.triton.race import races_over_row
from compiled_sampler.exact.triton.rows import (
    BRACKET_FIELDS,
    BRACKET_FIRST,
    BRACKET_LAST,
    FEW_ABOVE,
    HIGHEST_KEY,
    ID_MASK,
    IS_OPEN,
    KEEP_ALL,
    LIST_SIZE,
    LOWEST_KEY,
    MASKED_KEY,
    MASS_AFTER_WINNER,
    SUM_FIELDS,
    TOP_K_BRACKET,
    TOP_K_MASS_ABOVE,
    TOP_K_TOKENS,
    TOP_P_BRACKET,
    TOP_P_MASS,
    WEIGHT_ABOVE,
    WEIGHT_WITH,
    WINNER_KEY,
    complement,
    exp2_mass,
    finite,
    for_mask,
    kernel,
    key_float,
    list_of,
    mass_cut,
    order_key,
    packed_key,
    read_entries,
)
from compiled_sampler.exact.triton.search import NOTHING, STREAM, last_value, load_tile, masses, places
from compiled_sampler.exact.triton.winner import is_dropped, winner_under_filters


@triton.jit
def _filter_threshold(
    key, weights, lists, bracket, weight, limit, top, scaling, vocab_size, MASS: tl.constexpr, CAPACITY: tl.constexpr,
    LANES: tl.constexpr, DEPTH: tl.constexpr, PIVOTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The last packed key with less than ``limit`` weight above it, its number of ties, if the list was searched."""
    # key and weights are the first tile of the list, bracket and weight where the filter's are.
    row, listed, list_size = lists
    row_max, scale = scaling
    above_last, with_first = tl.load(weight + WEIGHT_ABOVE), tl.load(weight + WEIGHT_WITH)
    first, last = tl.load(bracket + BRACKET_FIRST), tl.load(bracket + BRACKET_LAST)
    is_over = above_last >= limit
    is_under = (with_first < limit) & (first > MASKED_KEY) & (above_last < limit)
    in_list = (list_size <= CAPACITY) & (first < last) & ((is_over | is_under) == 0)
    size = tl.where(in_list, list_size, vocab_size).to(tl.int32)
    least = tl.where(is_over, last + 1, tl.where(is_under, MASKED_KEY, first))
    most = tl.where(is_over, top, tl.where(is_under, first - 1, tl.minimum(last, top)))
    above = tl.where(is_over, 0, tl.where(is_under, with_first, above_last))
    values = tl.where(in_list, key, NOTHING)
    tokens = (row, listed, in_list, size)
    last_key, above = last_value(
        values, weights, tokens, 0, (least, most, above), limit, scaling, MASS, False, LANES, DEPTH, PIVOTS, MASKED
    )
    unit = tl.full((), 1, tl.int64)
    if MASS:
        unit = exp2_mass(key_float(last_key), row_max, scale)
    needed = tl.where(unit > 0, (limit - above + unit - 1) // tl.maximum(unit, 1), vocab_size)
    is_tie = for_mask(in_list) & (key == last_key)
    _key, token = read_entries(listed, places(LANES, DEPTH), is_tie)  # too many registers to keep them all
    values = tl.where(is_tie, complement(token), NOTHING)
    first_id = tl.full((), ID_MASK, tl.int32)  # the complement of the first id
    ids = (first_id - (vocab_size - 1), first_id, tl.zeros((), tl.int64))
    last_id, _above = last_value(
        values, weights, tokens, last_key, ids, needed, scaling, False, True, LANES, DEPTH, PIVOTS, MASKED
    )
    return (last_key.to(tl.int64) << 32) | last_id.to(tl.int64), needed, in_list


@triton.jit
def _prefix_mass(
    key, weights, tokens, last, tie, num_ties, scaling, LANES: tl.constexpr, DEPTH: tl.constexpr, MASKED: tl.constexpr
):
    """Mass of the tokens with keys from above ``tie`` up to ``last``, and of ``num_ties`` ties."""
    row, listed, in_list, size = tokens
    row_max, scale = scaling
    total = tl.sum(tl.where((key > tie) & (key <= last) & in_list, weights, 0), 0)
    for start in range(tl.where(in_list, LANES * DEPTH, 0), size, LANES * STREAM):
        other, _token, inside = load_tile(row, listed, in_list, start, size, LANES, STREAM, MASKED)
        total += tl.sum(tl.where((other > tie) & (other <= last) & inside, masses(other, scaling), 0), 0)
    return tl.sum(total) + num_ties * exp2_mass(key_float(tie), row_max, scale)


@triton.jit
def _exact_threshold(
    row, listed, parameters, brackets, sums, vocab_size, BASE_IS_ROW: tl.constexpr,
    LANES: tl.constexpr, DEPTH: tl.constexpr, PIVOTS: tl.constexpr, CAPACITY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The exact threshold of a row, with the first ``LANES * DEPTH`` tokens of its list in registers."""
    # parameters of the row are (row_mass, row_max, scale, top_k, top_p).
    row_mass, row_max, scale, top_k, top_p = parameters
    top = order_key(row_max)
    scaling = (finite(row_max), scale)
    list_size = tl.load(sums + LIST_SIZE)
    lists = (row, listed, list_size)
    place = places(LANES, DEPTH)
    key, _token = read_entries(listed, place, place < tl.minimum(list_size, CAPACITY))
    weights = tl.zeros((DEPTH, LANES), tl.int64)
    if top_p < 1.0:
        weights = masses(key, scaling)
    threshold = tl.full((), KEEP_ALL, tl.int64)
    base = row_mass
    if top_k < vocab_size:
        threshold, num_ties, in_list = _filter_threshold(
            key, weights, lists, brackets + TOP_K_BRACKET, sums + TOP_K_TOKENS, top_k, top, scaling, vocab_size,
            False, CAPACITY, LANES, DEPTH, PIVOTS, MASKED,
        )  # fmt: skip
        if (top_p < 1.0) & (not BASE_IS_ROW):
            size = tl.where(in_list, list_size, vocab_size).to(tl.int32)
            last = tl.where(in_list, tl.load(brackets + TOP_K_BRACKET + BRACKET_LAST), HIGHEST_KEY)
            tokens = (row, listed, in_list, size)
            tie = packed_key(threshold)
            base = _prefix_mass(key, weights, tokens, last, tie, num_ties, scaling, LANES, DEPTH, MASKED)
            base += tl.where(in_list, tl.load(sums + TOP_K_MASS_ABOVE), 0)
    if top_p < 1.0:
        top_p_threshold, _num_ties, _listed = _filter_threshold(
            key, weights, lists, brackets + TOP_P_BRACKET, sums + TOP_P_MASS, mass_cut(top_p, base), top, scaling,
            vocab_size, True, CAPACITY, LANES, DEPTH, PIVOTS, MASKED,
        )  # fmt: skip
        threshold = tl.maximum(threshold, top_p_threshold)
    return threshold


@triton.jit
def _is_listed(bracket, list_size, CAPACITY: tl.constexpr):
    """Whether the list of a row holds all of a bracket."""
    return (tl.load(bracket + BRACKET_FIRST) < tl.load(bracket + BRACKET_LAST)) & (list_size <= CAPACITY)


@triton.jit
def _has_last_kept(bracket, weight, limit):
    """Whether the bracket of a row's only filter has the last kept token."""
    # A bracket that begins below all tokens that can be drawn has it also where these are too few to reach the limit.
    begins_before = tl.load(weight + WEIGHT_ABOVE) < limit
    return begins_before & ((tl.load(weight + WEIGHT_WITH) >= limit) | (tl.load(bracket + BRACKET_FIRST) == LOWEST_KEY))


@kernel
def finish_kernel(
    logits, row_stride, words, word_stride, row_maxima, row_masses, scales, top_ks, top_ps, noise_masks, min_ps, firsts,
    seconds, thirds, fourths, brackets, sums, lists, part_winners, num_parts, part_size, found, vocab_size, draws,
    BASE_IS_ROW: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, PIVOTS: tl.constexpr, CAPACITY: tl.constexpr,
    STRIDE: tl.constexpr, MAX_PARTS: tl.constexpr, LISTED_TOP_K: tl.constexpr, MASKED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The exact threshold of a row that is still open, or, with ``draws``, the winner of its race under its filters.

    Reads:
        Each row's brackets, sums and list; row_maxima, row_masses, scales, top_ks and top_ps ``[R]``.
        With draws also noise_masks, min_ps, the noise keys firsts to fourths ``[R]``, and part_winners, int64
        ``[R, num_parts]`` of ``part_size`` tokens each.
        logits ``[R, >=V]``, ``row_stride`` numbers a row, and with MASKED their words, as ``race_kernel``, where the
        list does not hold what is searched, and the parts that race again.
    Writes:
        found: int64 ``[R]``, of rows that are open; what ``bracket_kernel`` left there stands for the others.
    Grid:
        ``(R,)``.
    Flags:
        draws: 1 where winners are looked for, 0 where thresholds are.
        BASE_IS_ROW: the base of top-p is the mass of the whole row rather than of what top-k keeps.
        LANES, DEPTH: threads, and tokens of the list's first tile that each keeps in registers.
        PIVOTS: tested a step.
        CAPACITY, STRIDE: entries of a list, and from list to list.
        MAX_PARTS: of a row.
        LISTED_TOP_K, MASKED: as ``race_kernel``; the first tells what rows have raced.
        EARLY: starts while the kernel before ends, and waits for that end.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0)
    brackets += index * BRACKET_FIELDS
    is_open = tl.load(brackets + IS_OPEN) == 1
    if is_open & (tl.load(brackets + WINNER_KEY) > MASKED_KEY):
        mass_after = tl.load(sums + index * SUM_FIELDS + MASS_AFTER_WINNER)
        is_open = is_dropped(mass_after, tl.load(row_masses + index), tl.load(top_ps + index))
    if is_open:
        row = (logits + index.to(tl.int64) * row_stride, words + index.to(tl.int64) * word_stride)
        listed = list_of(lists, index, STRIDE)
        sums += index * SUM_FIELDS
        row_mass, row_max, scale = tl.load(row_masses + index), tl.load(row_maxima + index), tl.load(scales + index)
        top_k, top_p = tl.load(top_ks + index), tl.load(top_ps + index)
        list_size = tl.load(sums + LIST_SIZE)
        by_mass = top_p < 1.0
        limit = tl.where(by_mass, mass_cut(top_p, row_mass), top_k)
        bracket = brackets + tl.where(by_mass, TOP_P_BRACKET, TOP_K_BRACKET)
        weight = sums + tl.where(by_mass, TOP_P_MASS, TOP_K_TOKENS)
        is_listed = _is_listed(bracket, list_size, CAPACITY)
        is_exact = (draws == 0) | (by_mass & (top_k < vocab_size))
        is_exact = is_exact | ((is_listed & _has_last_kept(bracket, weight, limit)) == 0)
        threshold = tl.full((), KEEP_ALL, tl.int64)
        if is_exact:
            threshold = _exact_threshold(
                row, listed, (row_mass, row_max, scale, top_k, top_p), brackets, sums, vocab_size,
                BASE_IS_ROW, LANES, DEPTH, PIVOTS, CAPACITY, MASKED,
            )  # fmt: skip
        answer = threshold
        if draws == 1:
            is_listed = is_listed & (tl.load(brackets + FEW_ABOVE) == 1)  # and all above the bracket
            is_listed = is_listed & ((is_exact == 0) | ((threshold >> 32) >= tl.load(bracket + BRACKET_FIRST)))
            noise_keys = (
                tl.load(firsts + index), tl.load(seconds + index), tl.load(thirds + index), tl.load(fourths + index)
            )  # fmt: skip
            above = tl.load(weight + WEIGHT_ABOVE)
            raced = races_over_row(top_k, vocab_size, LISTED_TOP_K)
            parts = (part_winners + index * num_parts, num_parts, part_size, raced)
            finite_max = finite(row_max)
            noise_mask, min_p = tl.load(noise_masks + index), tl.load(min_ps + index)
            scoring = (finite_max, min_p, scale, noise_mask, noise_keys)
            first_key, last_key = tl.load(bracket + BRACKET_FIRST), tl.load(bracket + BRACKET_LAST)
            answer = winner_under_filters(
                row, listed, list_size, is_listed, (first_key, last_key, above, limit, by_mass), threshold, is_exact,
                parts, scoring, vocab_size, LANES, MAX_PARTS, MASKED,
            )  # fmt: skip
        tl.store(found + index, answer)
