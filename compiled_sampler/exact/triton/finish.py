"""The last part of the wide path on CUDA: a row's exact threshold, searched in its list, or its winner."""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.exact.triton.keys import ANY_NUMBER, ANYWHERE, exp2_mass, finite, key_float, mass_cut, order_key
from compiled_sampler.exact.triton.proof import is_dropped
from compiled_sampler.exact.triton.race import has_raced
from compiled_sampler.exact.triton.search import NOTHING, STREAM, last_value, load_tile, masses, places
from compiled_sampler.exact.triton.token_list import list_of, read_entries
from compiled_sampler.exact.triton.winner import settled


@triton.jit
def _search(
    key, weights, row, listed, list_size, bracket, above_last, with_first, limit, top, row_max, scale,
    vocab_size, MASS: tl.constexpr, CAPACITY: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr,
    PIVOTS: tl.constexpr,
):  # fmt: skip
    """The last packed key with less than ``limit`` weight above it, the ties that takes, whether the list was searched.

    ``key`` and ``weights`` are the first tile of the list, ``bracket`` where its first and last key are.
    """
    first, last = tl.load(bracket), tl.load(bracket + 1)
    is_over = above_last >= limit
    is_under = (with_first < limit) & (first > -2147483648) & (above_last < limit)
    in_list = (list_size <= CAPACITY) & (first < last) & (is_over | is_under == 0)
    size = tl.where(in_list, list_size, vocab_size).to(tl.int32)
    least = tl.where(is_over, last + 1, tl.where(is_under, -2147483648, first))
    most = tl.where(is_over, top, tl.where(is_under, first - 1, tl.minimum(last, top)))
    above = tl.where(is_over, 0, tl.where(is_under, with_first, above_last))
    values = tl.where(in_list, key, NOTHING)
    found, above = last_value(
        values, weights, row, listed, in_list, size, 0, least, most, above, limit, row_max, scale,
        MASS, False, LANES, DEPTH, PIVOTS,
    )  # fmt: skip
    weight = tl.full((), 1, tl.int64)
    if MASS:
        weight = exp2_mass(key_float(found), row_max, scale)
    needed = tl.where(weight > 0, (limit - above + weight - 1) // tl.maximum(weight, 1), vocab_size)
    is_tie = in_list & (key == found)
    _key, token = read_entries(listed, places(LANES, DEPTH), is_tie)  # too many registers to keep them all
    values = tl.where(is_tie, 2147483647 - token, NOTHING)
    first_id = tl.full((), 2147483647, tl.int32)  # the complement of the first id
    last_id, _above = last_value(
        values, weights, row, listed, in_list, size, found, first_id - (vocab_size - 1), first_id,
        tl.zeros((), tl.int64), needed, row_max, scale, False, True, LANES, DEPTH, PIVOTS,
    )  # fmt: skip
    return (found.to(tl.int64) << 32) | last_id.to(tl.int64), needed, in_list


@triton.jit
def _prefix_mass(
    key, weights, row, listed, in_list, size, last, tie, num_ties, row_max, scale,
    LANES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Mass of the tokens with keys from above ``tie`` up to ``last``, and of ``num_ties`` ties."""
    total = tl.sum(tl.where((key > tie) & (key <= last) & in_list, weights, 0), 0)
    for start in range(tl.where(in_list, LANES * DEPTH, 0), size, LANES * STREAM):
        other, _token, inside = load_tile(row, listed, in_list, start, size, LANES, STREAM)
        total += tl.sum(tl.where((other > tie) & (other <= last) & inside, masses(other, row_max, scale), 0), 0)
    return tl.sum(total) + num_ties * exp2_mass(key_float(tie), row_max, scale)


@triton.jit
def _finish(
    row, row_mass, row_max, scale, top_k, top_p, brackets, sums, listed, vocab_size, BASE_IS_ROW: tl.constexpr,
    LANES: tl.constexpr, DEPTH: tl.constexpr, PIVOTS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The exact threshold of a row, with the first ``LANES * DEPTH`` tokens of its list in registers."""
    top = order_key(row_max)
    row_max = finite(row_max)
    list_size = tl.load(sums + 5)
    place = places(LANES, DEPTH)
    key, _token = read_entries(listed, place, place < tl.minimum(list_size, CAPACITY))
    weights = tl.zeros((DEPTH, LANES), tl.int64)
    if top_p < 1.0:
        weights = masses(key, row_max, scale)
    threshold = tl.full((), -9223372036854775808, tl.int64)
    base = row_mass
    if top_k < vocab_size:
        threshold, num_ties, in_list = _search(
            key, weights, row, listed, list_size, brackets, tl.load(sums), tl.load(sums + 1), top_k, top,
            row_max, scale, vocab_size, False, CAPACITY, LANES, DEPTH, PIVOTS,
        )  # fmt: skip
        if (top_p < 1.0) & (not BASE_IS_ROW):
            size = tl.where(in_list, list_size, vocab_size).to(tl.int32)
            last = tl.where(in_list, tl.load(brackets + 1), 2147483647)
            tie = (threshold >> 32).to(tl.int32)
            base = _prefix_mass(
                key, weights, row, listed, in_list, size, last, tie, num_ties, row_max, scale, LANES, DEPTH
            )
            base += tl.where(in_list, tl.load(sums + 2), 0)
    if top_p < 1.0:
        cut = mass_cut(top_p, base)
        found, _num_ties, _listed = _search(
            key, weights, row, listed, list_size, brackets + 2, tl.load(sums + 3), tl.load(sums + 4), cut,
            top, row_max, scale, vocab_size, True, CAPACITY, LANES, DEPTH, PIVOTS,
        )  # fmt: skip
        threshold = tl.maximum(threshold, found)
    return threshold


@triton.jit
def _is_listed(bracket, list_size, CAPACITY: tl.constexpr):
    """Whether the list of a row holds all of a bracket."""
    return (tl.load(bracket) < tl.load(bracket + 1)) & (list_size <= CAPACITY)


@triton.jit
def _has_the_last(bracket, weights, limit):
    """Whether the bracket of a row's only filter has the last kept token; its weights are above it, and with it.

    A bracket that begins below all tokens that can be drawn has it also where these are too few to reach the limit.
    """
    return (tl.load(weights) < limit) & ((tl.load(weights + 1) >= limit) | (tl.load(bracket) == -2147483647))


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANYWHERE)
def finish_kernel(
    logits, row_stride, row_maxima, row_masses, scales, top_ks, top_ps, noise_masks, min_ps, firsts, seconds, thirds,
    fourths, brackets, sums, lists, part_winners, num_parts, part_size, found, vocab_size, draws,
    BASE_IS_ROW: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, PIVOTS: tl.constexpr, CAPACITY: tl.constexpr,
    SUMS: tl.constexpr, PARTS: tl.constexpr, FEW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The exact threshold of a row that is still open, or, with ``draws``, the winner of its race."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0)
    brackets += index * 8
    is_open = tl.load(brackets + 5) == 1
    if is_open & (tl.load(brackets + 6) > -2147483648):
        is_open = is_dropped(tl.load(sums + index * SUMS + 6), tl.load(row_masses + index), tl.load(top_ps + index))
    if is_open:
        row = logits + index.to(tl.int64) * row_stride
        listed = list_of(lists, index, CAPACITY)
        sums += index * SUMS
        row_mass, row_max, scale = tl.load(row_masses + index), tl.load(row_maxima + index), tl.load(scales + index)
        top_k, top_p = tl.load(top_ks + index), tl.load(top_ps + index)
        list_size = tl.load(sums + 5)
        by_mass = top_p < 1.0
        limit = tl.where(by_mass, mass_cut(top_p, row_mass), top_k)
        bracket, bracket_weights = brackets + tl.where(by_mass, 2, 0), sums + tl.where(by_mass, 3, 0)
        is_listed = _is_listed(bracket, list_size, CAPACITY)
        is_exact = (draws == 0) | (by_mass & (top_k < vocab_size))
        is_exact = is_exact | ((is_listed & _has_the_last(bracket, bracket_weights, limit)) == 0)
        threshold = tl.full((), -9223372036854775808, tl.int64)
        if is_exact:
            threshold = _finish(
                row, row_mass, row_max, scale, top_k, top_p, brackets, sums, listed, vocab_size, BASE_IS_ROW,
                LANES, DEPTH, PIVOTS, CAPACITY,
            )  # fmt: skip
        answer = threshold
        if draws == 1:
            is_listed = is_listed & (tl.load(brackets + 4) == 1)  # and all above the bracket
            is_listed = is_listed & ((is_exact == 0) | ((threshold >> 32) >= tl.load(bracket)))
            first, second = tl.load(firsts + index), tl.load(seconds + index)
            third, fourth = tl.load(thirds + index), tl.load(fourths + index)
            answer = settled(
                row, listed, list_size, bracket, tl.load(bracket_weights), limit, by_mass, is_exact, threshold,
                is_listed, vocab_size, part_winners + index * num_parts, num_parts, part_size,
                has_raced(top_k, vocab_size, FEW), finite(row_max), scale, tl.load(noise_masks + index),
                tl.load(min_ps + index), first, second, third, fourth, LANES, PARTS,
            )  # fmt: skip
        tl.store(found + index, answer)
