"""The first part of the search for a threshold on CUDA: where the key of a filter's last token may be.

A bracket is the first and the last key, int32, between which that key probably lies. The sample that it comes from
decides how long the search takes, never what is found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.core.mass import MASS_BITS
from compiled_sampler.exact.triton.rows import (
    BRACKET_FIELDS,
    BRACKET_FIRST,
    BRACKET_LAST,
    FEW_ABOVE,
    HIGHEST_KEY,
    IS_OPEN,
    LOWEST_KEY,
    MASKED_KEY,
    NO_WINNER,
    SUM_FIELDS,
    TOP_K_BRACKET,
    TOP_P_BRACKET,
    WINNER_KEY,
    between,
    finite,
    kernel,
    key_float,
    nearest,
    neighbours,
    order_key,
)
from compiled_sampler.exact.triton.winner import needs_search, sample, sample_ids

_UNITS = tl.constexpr(2.0**29)  # of a sample's shares together: a sum of integers is one instruction a warp
_MASS_UNIT = tl.constexpr(2.0**-MASS_BITS)  # of a mass is a share
_LEAST_TOTAL = tl.constexpr(1e-15)  # of a sample's shares, so that they can be divided by it


@triton.jit
def _share(x, row_max, scale):
    """About ``2**t``, float32; 0 where the weight is."""
    t = (x - row_max) * scale
    return tl.where(t > -64.0, tl.exp2(tl.minimum(t, 0.0)), 0.0)


@triton.jit
def _tails(keys, units, pivots):
    """The sample's units up to each pivot, as float32."""
    return tl.sum(tl.where(keys[None, :] <= pivots[:, None], units[None, :], 0), 1).to(tl.float32)


@triton.jit
def _spread(noise, square, DEVIATIONS: tl.constexpr):
    """How far a sum may be off, by its variance and the square of its largest terms."""
    return DEVIATIONS * tl.sqrt(tl.maximum(noise, 0.0) + 4.0 * square)


# The tail of a key is the weight up to it, its head the weight above. A sample knows small tails well: no term is
# above the key's own weight. It knows small heads well unless few tokens have most of the mass. Either is enough.
# ``units`` are int32 weights as multiples of ``unit``, float32, shares with MASS and else all 1; ``total`` is the
# weight of the sample's ``size`` tokens, float32; ``top`` is the int32 key of ``row_max``, which is finite. ``goals``
# are ``(tail_goal, head_goal, start, noise, head_unit, slack)``: the tail and the head at the boundary, in terms of
# the sample; the part of the tail whose variance is ``noise``, that of the goals; the largest term of a head, as far
# as its variance goes; and an error of both goals besides chance. A bracket is twice DEVIATIONS wide; of the PIVOTS
# tested a step, a half is for either end.
@triton.jit
def _bracket(
    keys, units, unit, size, total, top, goals, row_max, scale,
    MASS: tl.constexpr, STEPS: tl.constexpr, DEVIATIONS: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The first and the last key (int32) between which the goal is reached, as far as is likely."""
    tail_goal, head_goal, start, noise, head_unit, slack = goals
    number = tl.arange(0, PIVOTS)
    for_last = number >= PIVOTS // 2
    numerator = 2 * (number % (PIVOTS // 2)) + for_last.to(tl.int32)
    bottom = tl.min(tl.where((units > 0) & (keys > MASKED_KEY), keys, HIGHEST_KEY))
    bottom = tl.maximum(tl.minimum(bottom, top), LOWEST_KEY)
    first, first_end = bottom - 1, top  # the first pivot parts the masked tokens from the others
    last_start, last = bottom - 1, top
    for step in range(STEPS):
        by_key = (numerator % 2 == 1) & (step < 2)  # by then outliers are apart
        least = tl.where(for_last, last_start, first)
        pivots = between(least, tl.where(for_last, last, first_end) - 1, numerator, by_key, PIVOTS)
        tails = _tails(keys, units, pivots) * unit
        heads = total - tails
        share = _share(key_float(pivots), row_max, scale) if MASS else 1.0
        rest, around = tl.maximum(tails - start, 0.0), heads
        variance = share * rest - rest * rest / size
        if not MASS:  # also that of what would be seen at the boundary: few seen by chance would leave little doubt
            variance = tl.maximum(variance, tail_goal - tail_goal * tail_goal / size)
            around = tl.maximum(heads, head_goal)
        error = slack + _spread(noise + variance, share * share, DEVIATIONS)
        head_error = slack + _spread(head_unit * around, head_unit * head_unit, DEVIATIONS)
        is_below = (tails + error < tail_goal) | (heads - head_error > head_goal)
        is_above = (tails - error > tail_goal) | (heads + head_error < head_goal)
        first = tl.maximum(first, tl.max(tl.where(is_below & (pivots < top), pivots + 1, MASKED_KEY)))
        first_end = tl.minimum(first_end, tl.min(tl.where(is_below | (pivots < first), top, pivots)))
        last = tl.minimum(last, tl.min(tl.where(is_above, pivots, top)))
        last_start = tl.maximum(last_start, tl.max(tl.where(is_above | (pivots >= last), MASKED_KEY, pivots + 1)))
    # the search stops short of a single key: on to a key of the sample that it stopped before, or past
    next_key, last_key = nearest(neighbours(keys[None, :], (keys > MASKED_KEY)[None, :], first, last))
    first = tl.where(next_key <= first_end, next_key, first)
    first = tl.where(first < bottom, LOWEST_KEY, first)  # masked tokens, often most of a row, fill no list
    last = tl.where((last < top) & (last_key >= last_start), last_key, last)
    return tl.minimum(first, last), last


@triton.jit
def _top_k_mass(keys, ones, units, unit, first, last, num_tail):
    """About the mass that top-k leaves out, in terms of the sample, that of its last token, and the former's doubt."""
    # The mass between the bracket's ends is spread over its tokens evenly: that the boundary is at a known rank says
    # more of the mass up to it than the mass up to any known key would.
    is_last = tl.arange(0, 2) == 1
    pivots = tl.where(is_last, last, tl.maximum(first, LOWEST_KEY) - 1)
    tokens, masses = _tails(keys, ones, pivots), _tails(keys, units, pivots) * unit
    before, with_last = tl.sum(tl.where(is_last, 0.0, tokens)), tl.sum(tl.where(is_last, tokens, 0.0))
    mass = tl.sum(tl.where(is_last, 0.0, masses))
    inside = tl.sum(tl.where(is_last, masses, 0.0)) - mass
    share = inside / tl.maximum(with_last - before, 1.0)
    part = tl.minimum(tl.maximum(num_tail - before, 0.0), with_last - before)
    return mass + part * share, share, inside * 0.0625


@triton.jit
def _write_brackets(
    x, row, brackets, vocab_size, FIRST_PASS: tl.constexpr, BASE_IS_ROW: tl.constexpr,
    SAMPLE: tl.constexpr, RUN: tl.constexpr, STEPS: tl.constexpr, DEVIATIONS: tl.constexpr, PIVOTS: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """Write both brackets of a row, and whether few tokens are above, as far as the sample ``x`` of it says."""
    # row is its (row_mass, row_max, scale, top_k, top_p).
    row_mass, row_max, scale, top_k, top_p = row
    inside = sample_ids(vocab_size, SAMPLE, RUN) < vocab_size
    x = x.to(tl.float32)
    keys = order_key(x)
    top = order_key(row_max)
    if FIRST_PASS:
        top = tl.maximum(tl.max(keys), LOWEST_KEY)  # of the sample: a bracket that reaches it has no end
    row_max = finite(row_max)
    ones = inside.to(tl.int32)
    size = tl.sum(ones).to(tl.float32)
    rate = size / vocab_size
    first, last = tl.full((), HIGHEST_KEY, tl.int32), tl.full((), MASKED_KEY, tl.int32)
    num_tail = tl.maximum(vocab_size - top_k, 0).to(tl.float32) * rate
    if top_k < vocab_size:
        first, last = _bracket(
            keys, ones, 1.0, size, size, top, (num_tail, size - num_tail, 0.0, 0.0, 1.0, 0.0), row_max, scale,
            False, STEPS, DEVIATIONS, PIVOTS,
        )  # fmt: skip
        if FIRST_PASS:
            is_blind = top == LOWEST_KEY  # masks left no token of the sample: all others are listed
            first = tl.where(is_blind, LOWEST_KEY, first)
            last = tl.where((last >= top) | is_blind, HIGHEST_KEY, last)
    tl.store(brackets + TOP_K_BRACKET + BRACKET_FIRST, first)
    tl.store(brackets + TOP_K_BRACKET + BRACKET_LAST, last)
    first_p, last_p = tl.full((), HIGHEST_KEY, tl.int32), tl.full((), MASKED_KEY, tl.int32)
    if (top_p < 1.0) & (not FIRST_PASS):
        # of x, not of the keys: Triton 3.6 fails to compile another use of those here for 16-bit logits
        shares = tl.where(x > float("-inf"), _share(x, row_max, scale), 0.0)
        total = tl.maximum(tl.sum(shares), _LEAST_TOTAL)
        unit = total / _UNITS
        units = (shares * (_UNITS / total)).to(tl.int32)
        # 1 - top_p is formed in float64, in which it is exact
        whole = (row_mass.to(tl.float64) * _MASS_UNIT).to(tl.float32) * rate
        kept, cut = top_p.to(tl.float32), (1.0 - top_p).to(tl.float32)
        tail_goal, head_goal, head_unit = cut * whole, kept * whole, tl.full((), 1.0, tl.float32)
        start, noise, slack = cut * 0.0, cut * 0.0, cut * 0.0
        if (top_k < vocab_size) & (not BASE_IS_ROW):  # what top-k leaves out is no part of the base
            start, share, doubt = _top_k_mass(keys, ones, units, unit, first, last, num_tail)
            tail_goal += kept * start
            head_goal = kept * (total - start)
            head_unit = cut + kept * share
            slack = kept * doubt
            noise = cut * cut * tl.maximum(share * start - start * start / size, 0.0)
            noise += kept * kept * share * share * (size - num_tail)
        first_p, last_p = _bracket(
            keys, units, unit, size, total, top, (tail_goal, head_goal, start, noise, head_unit, slack), row_max, scale,
            True, STEPS, DEVIATIONS, PIVOTS,
        )  # fmt: skip
        if (top_k < vocab_size) & (not BASE_IS_ROW):  # what is kept ends before top-k does
            first_p = tl.minimum(tl.maximum(first_p, first), last_p)
    tl.store(brackets + TOP_P_BRACKET + BRACKET_FIRST, first_p)
    tl.store(brackets + TOP_P_BRACKET + BRACKET_LAST, last_p)
    above = tl.sum((x > key_float(tl.where(top_p < 1.0, last_p, last))).to(tl.int32)).to(tl.float32)
    tl.store(brackets + FEW_ABOVE, (above <= FEW * rate).to(tl.int32))


@triton.jit
def _load_parameters(row_arrays, index):
    """The ``(row_mass, row_max, scale, top_k, top_p)`` of a row, of the arrays of each."""
    row_masses, row_maxima, scales, top_ks, top_ps = row_arrays
    row_mass, row_max, scale = tl.load(row_masses + index), tl.load(row_maxima + index), tl.load(scales + index)
    return row_mass, row_max, scale, tl.load(top_ks + index), tl.load(top_ps + index)


@kernel
def bracket_kernel(
    logits, row_stride, words, word_stride, row_maxima, nan_bits, row_masses, scales, top_ks, top_ps, are_open,
    packed, found, brackets, sums, part_winners, num_parts, open_rows, vocab_size, draws, FIRST_PASS: tl.constexpr,
    BASE_IS_ROW: tl.constexpr, SAMPLE: tl.constexpr, RUN: tl.constexpr, STEPS: tl.constexpr, DEVIATIONS: tl.constexpr,
    PIVOTS: tl.constexpr, FEW: tl.constexpr, MAX_PARTS: tl.constexpr, MAX_SAMPLES: tl.constexpr, MASKED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The brackets of a row that is searched; of another row the answer, its threshold or, with ``draws``, its winner.

    Reads:
        logits ``[R, >=V]``, ``row_stride`` numbers a row: a sample, and what a proof takes, of open rows; with
        MASKED their words, as ``race_kernel``.
        Each row's are_open (bool), row_masses, row_maxima, scales, top_ks, top_ps and packed, its threshold if it is
        not open, ``[R]``.
        part_winners: int64 ``[R, num_parts]``, of ``race_kernel``, with draws.
    Writes:
        found: int64 ``[R]``, the winner of all tokens or the threshold; final where the row is not open.
        brackets: all fields of a row that is open, IS_OPEN and WINNER_KEY of each.
        sums: zeros, of rows that are open.
        open_rows: with draws, how many are open, and which, in any order.
        With FIRST_PASS, for ``measure_kernel`` to find maxima: row_maxima, -inf, and nan_bits, 0.
    Grid:
        ``(R,)``.
    Flags:
        draws: 1 where winners are looked for: rows are not open where a part proves that top-p keeps their winner.
        FIRST_PASS: no pass over the row came before: every live row is open, and there is no top-p.
        BASE_IS_ROW: the base of top-p is the mass of the whole row rather than of what top-k keeps.
        SAMPLE, RUN: tokens of a sample, in runs of neighbours.
        STEPS, DEVIATIONS, PIVOTS: of the search in the sample, as ``_bracket``.
        FEW: tokens above a bracket that are listed too.
        MAX_PARTS, MAX_SAMPLES: the most parts of a row, and samples of a proof.
        MASKED: no token is sampled whose bit is 0.
        EARLY: starts while the kernel before ends, and waits for that end.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0)
    row, words = logits + index.to(tl.int64) * row_stride, words + index.to(tl.int64) * word_stride
    row_arrays = (row_masses, row_maxima, scales, top_ks, top_ps)
    brackets += index * BRACKET_FIELDS
    searches = tl.load(are_open + index)
    tl.store(brackets + WINNER_KEY, MASKED_KEY)
    if FIRST_PASS:
        tl.store(found + index, NO_WINNER)
        tl.store(row_maxima + index, float("-inf"))
        tl.store(nan_bits + index, 0)
    elif draws == 1:
        part = tl.arange(0, MAX_PARTS)
        winner = tl.max(tl.load(part_winners + index * num_parts + part, mask=part < num_parts, other=NO_WINNER))
        tl.store(found + index, winner)
        if searches:
            searches = needs_search(
                row, words, winner, _load_parameters(row_arrays, index), brackets + WINNER_KEY, vocab_size, SAMPLE,
                RUN, MAX_SAMPLES, MASKED,
            )  # fmt: skip
        if searches:
            tl.store(open_rows + 1 + tl.atomic_add(open_rows, 1, sem="relaxed"), index)
    else:
        tl.store(found + index, tl.load(packed + index))
    tl.store(brackets + IS_OPEN, searches.to(tl.int32))
    # before the branch: beside what uses them, the compiler waits for a few of these loads at a time; but where a race
    # came first, most rows search nothing, and even loads of nothing cost more than the waits of the others
    if FIRST_PASS:
        x = sample(row, words, searches, vocab_size, SAMPLE, RUN, MASKED)
    if searches:
        tl.store(sums + index * SUM_FIELDS + tl.arange(0, SUM_FIELDS), tl.zeros((SUM_FIELDS,), tl.int64))
        if not FIRST_PASS:
            x = sample(row, words, True, vocab_size, SAMPLE, RUN, MASKED)
        _write_brackets(
            x, _load_parameters(row_arrays, index), brackets, vocab_size, FIRST_PASS, BASE_IS_ROW, SAMPLE, RUN, STEPS,
            DEVIATIONS, PIVOTS, FEW,
        )  # fmt: skip
