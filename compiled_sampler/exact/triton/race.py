"""The race over whole rows on CUDA, for the rows of a batch whose kept tokens may lie beyond the candidates.

Inductor's kernels cannot skip a row. These do: a row that needs no race costs the start of a few programs.

A program computes bounds of scores, and scores only of the tiles that may hold a better one. A row races before its
threshold is known, in parts. If the winner of all its tokens is kept, it is the winner of those
that are kept: no other of them has a better score.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.exact.triton.keys import ANY_NUMBER, ANYWHERE, exp2_mass, finite, last_look
from compiled_sampler.exact.triton.noise import gumbel, gumbel_bound, token_bits

_BITS_OF_128 = tl.constexpr(0x43000000)
_POSITIVE_INFINITY_KEY = tl.constexpr(0x7F800000)
MASKED_KEY = tl.constexpr(-2147483648)
"""``order.MASKED_KEY``."""

NO_WINNER = tl.constexpr(-9223372036854775808)
"""``wide_race.NO_WINNER``."""


@triton.jit
def has_raced(top_k, vocab_size, FEW: tl.constexpr):
    """Whether a row races before its threshold is known: not where top-k keeps few tokens, which a list will hold."""
    return (top_k >= vocab_size) | (top_k > FEW)


@triton.jit
def _passes(x, row_max, min_p, scale):
    """``draw.passes_min_p``."""
    keep = x > float("-inf")
    if min_p > float("-inf"):
        keep = keep & ((x - row_max) * scale >= min_p)
    return keep


@triton.jit
def _key_of(x, bits, keep, scale, noise_mask):
    """Score keys of tokens by their random bits; that of a masked one unless ``keep``."""
    noise = (gumbel(bits).to(tl.int32, bitcast=True) & noise_mask).to(tl.float32, bitcast=True)
    score = x * scale + noise
    infinite = (noise + 192.0).to(tl.int32, bitcast=True) + (_POSITIVE_INFINITY_KEY - _BITS_OF_128)
    score_bits = tl.where(score == float("inf"), infinite, score.to(tl.int32, bitcast=True))
    return tl.where(keep, score_bits ^ ((score_bits >> 31) & 0x7FFFFFFF), MASKED_KEY)


@triton.jit
def score_key(x, ids, keep, row_max, min_p, scale, noise_mask, first, second, third, fourth):
    """Score keys of tokens; that of a masked one unless ``keep``, and where min_p drops it."""
    bits = token_bits(ids, first, second, third, fourth)
    return _key_of(x, bits, keep & _passes(x, row_max, min_p, scale), scale, noise_mask)


@triton.jit
def best_of(key, ids):
    """The best packed (score key, id) of a tile."""
    return tl.max((key.to(tl.int64) << 32) | (2147483647 - ids).to(tl.int64))


@triton.jit
def _largest_bound(x, bits, row_max, min_p, scale, noise_mask):
    """A key that no score of the tile's tokens exceeds; for ``+inf`` that of it, where others decide."""
    bound = x * scale + gumbel_bound(bits, (noise_mask & 1).to(tl.float32))
    if min_p > float("-inf"):
        bound = tl.where((x - row_max) * scale < min_p, float("-inf"), bound)
    most = tl.max(bound, 0).to(tl.int32, bitcast=True)
    return tl.max(tl.where(most < 0, -2147483648 - most, most), 0)  # integers: one instruction a warp


@triton.jit
def _race_part(
    row, start, tiles, reached, row_max, min_p, scale, noise_mask, first, second, third, fourth, vocab_size,
    DEPTH: tl.constexpr, LANES: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    """The best packed (score key, id) of a part of a row, if above ``reached``, and with ``WEIGHS`` its mass."""
    number = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    best = tl.full((DEPTH, LANES), MASKED_KEY, tl.int32)
    best_ids = number
    mass = tl.zeros((LANES,), tl.int64)
    at = start
    x = last_look(row + at + number, number < vocab_size - at)
    for _ in range(tiles):
        after = at + DEPTH * LANES
        next_x = last_look(row + after + number, number < vocab_size - after)  # while x is used
        x = x.to(tl.float32)
        ids = at + number
        if WEIGHS:
            mass += tl.sum(exp2_mass(x, row_max, scale), 0)
        bits = token_bits(ids, first, second, third, fourth)
        most = _largest_bound(x, bits, row_max, min_p, scale, noise_mask)
        if (most > reached) | (most >= _POSITIVE_INFINITY_KEY):  # else no token of the tile is better than the best
            key = _key_of(x, bits, _passes(x, row_max, min_p, scale), scale, noise_mask)
            best_ids = tl.where(key > best, ids, best_ids)
            best = tl.maximum(key, best)
            reached = tl.maximum(tl.max(tl.max(best, 0), 0), reached)
        x = next_x
        at = after
    return best_of(best, best_ids), tl.sum(mass)


@triton.jit
def _mass_of_part(row, start, stop, row_max, scale, DEPTH: tl.constexpr, LANES: tl.constexpr):
    """The mass of a part of a row that does not race: in longer tiles, as there is nothing to decide."""
    number = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    mass = tl.zeros((LANES,), tl.int64)
    for at in range(start, stop, DEPTH * LANES):
        x = last_look(row + at + number, number < stop - at).to(tl.float32)
        mass += tl.sum(exp2_mass(x, row_max, scale), 0)
    return tl.sum(mass)


@triton.jit
def _races(known, beyond, top_k, vocab_size, FEW: tl.constexpr):
    """Whether rows race that may have a winner already, of an earlier race."""
    return (known == NO_WINNER) & beyond & has_raced(top_k, vocab_size, FEW)


@triton.jit
def _race_row(
    logits, row_stride, beyonds, row_maxima, scales, top_ks, noise_masks, min_ps, firsts, seconds, thirds, fourths,
    raced, founds, part_winners, part_masses, index, part, vocab_size, tiles, DEPTH: tl.constexpr, LANES: tl.constexpr,
    MASS_DEPTH: tl.constexpr, FEW: tl.constexpr, AGAIN: tl.constexpr, FOUND: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    """``race_kernel`` for a row."""
    place = index * tl.num_programs(1) + part
    known = tl.full((), NO_WINNER, tl.int64)
    if AGAIN:
        known = tl.load(raced + place)
    races = _races(known, tl.load(beyonds + index), tl.load(top_ks + index), vocab_size, FEW)
    row, start = logits + index.to(tl.int64) * row_stride, part * tiles * (DEPTH * LANES)
    if races:
        reached = tl.full((), MASKED_KEY, tl.int32)
        if FOUND:
            reached = tl.maximum((tl.load(founds + index) >> 32).to(tl.int32), MASKED_KEY + 1) - 1
        known, mass = _race_part(
            row, start, tiles, reached, finite(tl.load(row_maxima + index)), tl.load(min_ps + index),
            tl.load(scales + index), tl.load(noise_masks + index), tl.load(firsts + index), tl.load(seconds + index),
            tl.load(thirds + index), tl.load(fourths + index), vocab_size, DEPTH, LANES, WEIGHS,
        )  # fmt: skip
        if WEIGHS:
            tl.store(part_masses + place, mass)
    elif WEIGHS:
        stop = tl.minimum(start + tiles * (DEPTH * LANES), vocab_size)
        row_max = finite(tl.load(row_maxima + index))
        mass = _mass_of_part(row, start, stop, row_max, tl.load(scales + index), MASS_DEPTH, LANES)
        tl.store(part_masses + place, mass)
    tl.store(part_winners + place, known)


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANYWHERE)
def race_kernel(
    logits, row_stride, beyonds, row_maxima, scales, top_ks, noise_masks, min_ps, firsts, seconds, thirds, fourths,
    raced, founds, part_winners, part_masses, open_rows, num_rows, vocab_size, tiles, DEPTH: tl.constexpr,
    LANES: tl.constexpr, MASS_DEPTH: tl.constexpr, FEW: tl.constexpr, AGAIN: tl.constexpr, FOUND: tl.constexpr,
    WEIGHS: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """For ``GROUP`` rows, the best packed (score key, id) that min_p keeps in a part, or the smallest number: no race.

    With ``AGAIN`` some rows have raced, and their winners are copied. With ``FOUND`` a token of each row is known that
    is as good as its winner or not, and what is worse than it is of no interest. With ``WEIGHS`` the mass of each part
    is asked for, also of rows that do not race. And the list of open rows, which ``guess_kernel`` fills, is made empty.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    first, part = tl.program_id(0) * GROUP, tl.program_id(1)
    if first + part == 0:
        tl.store(open_rows, 0)
    asked = WEIGHS
    if not WEIGHS:  # mostly no row of the group races: then the program has looked at all of them at once, and ends
        rows = first + tl.arange(0, GROUP)
        inside, places = rows < num_rows, rows * tl.num_programs(1) + part
        known = tl.full((GROUP,), NO_WINNER, tl.int64)
        if AGAIN:
            known = tl.load(raced + places, inside)
        beyond = tl.load(beyonds + rows, inside, 0) != 0
        races = inside & _races(known, beyond, tl.load(top_ks + rows, inside, 0), vocab_size, FEW)
        tl.store(part_winners + places, known, inside)
        asked = tl.max(races.to(tl.int32), 0) > 0
    if asked:
        for place in range(GROUP):
            index = first + place
            if index < num_rows:
                _race_row(
                    logits, row_stride, beyonds, row_maxima, scales, top_ks, noise_masks, min_ps, firsts, seconds,
                    thirds, fourths, raced, founds, part_winners, part_masses, index, part, vocab_size, tiles, DEPTH,
                    LANES, MASS_DEPTH, FEW, AGAIN, FOUND, WEIGHS,
                )  # fmt: skip
