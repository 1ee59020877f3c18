"""The race over whole rows on CUDA, for the rows of a batch whose kept tokens may lie beyond the candidates.

Inductor's kernels cannot skip a row. These do: a row that needs no race costs the start of a few programs.

A program computes bounds of scores, and scores only of the tiles that may hold a better one. A row races before its
threshold is known, in parts. If the winner of all its tokens is kept, it is the winner of those
that are kept: no other of them has a better score.

``scoring`` is what scores of a row depend on: ``(row_max, min_p, scale, noise_mask, noise_keys)``, the first finite.

The noise is that of ``core/noise.py``, operation by operation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.core.arithmetic import BIAS, MAGIC, MAGIC_BITS
from compiled_sampler.core.noise import BITS_OF_MINUS_2_31, BOUND, HALF_LOG, LOG, MIX_1, MIX_2, SIGN_BIT, STEP
from compiled_sampler.exact.triton.rows import (
    ID_MASK,
    LOWEST_KEY,
    MASKED_KEY,
    NO_WINNER,
    POSITIVE_INFINITY_KEY,
    exp2_mass,
    finite,
    kernel,
    last_look,
    load_tile_words,
    pack,
    packed_key,
    unmasked,
)

_H0, _H1, _H2, _H3, _H4, _H5 = (tl.constexpr(c) for c in HALF_LOG)
_L0, _L1, _L2, _L3 = (tl.constexpr(c) for c in LOG)
_MIX_1, _MIX_2 = tl.constexpr(MIX_1), tl.constexpr(MIX_2)
_LARGEST_OF_HALF = tl.constexpr(BITS_OF_MINUS_2_31)
_EXPONENT_OF_HALF = tl.constexpr(MAGIC_BITS + 2 * SIGN_BIT - BIAS)
_WHOLE = tl.constexpr(MAGIC + SIGN_BIT + 31.0)
_EXPONENT = tl.constexpr(MAGIC_BITS - BIAS)
_MAGIC = tl.constexpr(MAGIC)
_BOUND, _STEP = tl.constexpr(BOUND), tl.constexpr(STEP)


@triton.jit
def token_bits(ids, noise_keys):
    """``noise.token_bits``; the keys are the four of ``noise.NoiseKeys``."""
    first, second, third, fourth = noise_keys
    h = ids * first + second
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * _MIX_1 + third
    h = h ^ ((h >> 15) & 0x1FFFF)
    h = h * _MIX_2 + fourth
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def exponential(bits):
    """``noise.exponential``."""
    y = (bits | 1).to(tl.float32).to(tl.int32, bitcast=True)
    exponent = (tl.where(y < _LARGEST_OF_HALF, y, _LARGEST_OF_HALF) >> 23) + _EXPONENT_OF_HALF
    scaled = y - (exponent << 23)
    lowered = (scaled.to(tl.float32, bitcast=True) - 2.0).to(tl.int32, bitcast=True)
    s = tl.minimum(scaled, lowered).to(tl.float32, bitcast=True)
    p = s * _H5 + _H4
    p = p * s + _H3
    p = p * s + _H2
    p = p * s + _H1
    p = p * s + _H0
    return s * p - (exponent.to(tl.float32, bitcast=True) - _WHOLE)


@triton.jit
def negative_log2(x):
    """``noise.negative_log2``."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + _EXPONENT
    fraction = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    p = fraction * _L3 + _L2
    p = p * fraction + _L1
    p = p * fraction + _L0
    magic = tl.full((), _MAGIC, tl.float32)
    return (magic - exponent.to(tl.float32, bitcast=True)) - fraction * p


@triton.jit
def gumbel(bits):
    """``noise.gumbel``, of token bits."""
    return negative_log2(exponential(bits))


@triton.jit
def gumbel_bound(bits, share):
    """``noise.bound_of``."""
    word = bits.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return share * _BOUND - word.to(tl.float32) * (_STEP * share)


_BITS_OF_128 = tl.constexpr(0x43000000)


@triton.jit
def races_over_row(top_k, vocab_size, LISTED_TOP_K: tl.constexpr):
    """Whether a row races over all its tokens: not where top-k keeps few, which a list will hold."""
    return (top_k >= vocab_size) | (top_k > LISTED_TOP_K)


@triton.jit
def admits(x, row_max, min_p, scale):
    """``score.admitted`` without a last token: whether tokens can be drawn, and min_p keeps them."""
    keep = x > float("-inf")
    if min_p > float("-inf"):
        keep = keep & ((x - row_max) * scale >= min_p)
    return keep


@triton.jit
def key_of_bits(x, bits, keep, scale, noise_mask):
    """Score keys of tokens by their random bits; that of a masked one unless ``keep``."""
    noise = (gumbel(bits).to(tl.int32, bitcast=True) & noise_mask).to(tl.float32, bitcast=True)
    score = x * scale + noise
    infinite = (noise + 192.0).to(tl.int32, bitcast=True) + (POSITIVE_INFINITY_KEY - _BITS_OF_128)
    score_bits = tl.where(score == float("inf"), infinite, score.to(tl.int32, bitcast=True))
    return tl.where(keep, score_bits ^ ((score_bits >> 31) & ID_MASK), MASKED_KEY)


@triton.jit
def score_key(x, ids, keep, scoring):
    """``score.admitted_key``: score keys of tokens; that of a masked one unless ``keep``, and where min_p drops it."""
    row_max, min_p, scale, noise_mask, noise_keys = scoring
    bits = token_bits(ids, noise_keys)
    return key_of_bits(x, bits, keep & admits(x, row_max, min_p, scale), scale, noise_mask)


@triton.jit
def _largest_bound(x, bits, scoring):
    """A key that no score of the tile's tokens exceeds; for ``+inf`` that of it, where others decide."""
    row_max, min_p, scale, noise_mask, _noise_keys = scoring
    bound = x * scale + gumbel_bound(bits, (noise_mask & 1).to(tl.float32))
    if min_p > float("-inf"):
        bound = tl.where((x - row_max) * scale < min_p, float("-inf"), bound)
    most = tl.max(bound, 0).to(tl.int32, bitcast=True)
    return tl.max(tl.where(most < 0, MASKED_KEY - most, most), 0)  # integers: one instruction a warp


@triton.jit
def _unmasked_tile(x, words, at, stop):
    """``unmasked`` logits ``[DEPTH, 32]`` of the tokens from ``at``, a multiple of 32, on; from ``stop`` on -inf."""
    tl.static_assert(x.shape[1] == 32)
    word = load_tile_words(words, at, tl.arange(0, x.shape[0])[:, None], stop - at)
    return unmasked(x, word, tl.arange(0, 32)[None, :])


@triton.jit
def _race_part(
    row, words, start, tiles, reached, scoring, vocab_size, DEPTH: tl.constexpr, LANES: tl.constexpr,
    WEIGHS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The best packed (score key, id) of a part of a row, if above ``reached``, and with ``WEIGHS`` its mass."""
    row_max, min_p, scale, noise_mask, noise_keys = scoring
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
        if MASKED:
            x = _unmasked_tile(x, words, at, vocab_size)
        if WEIGHS:
            mass += tl.sum(exp2_mass(x, row_max, scale), 0)
        bits = token_bits(ids, noise_keys)
        most = _largest_bound(x, bits, scoring)
        if (most > reached) | (most >= POSITIVE_INFINITY_KEY):  # else no token of the tile is better than the best
            key = key_of_bits(x, bits, admits(x, row_max, min_p, scale), scale, noise_mask)
            best_ids = tl.where(key > best, ids, best_ids)
            best = tl.maximum(key, best)
            reached = tl.maximum(tl.max(tl.max(best, 0), 0), reached)
        x = next_x
        at = after
    return tl.max(pack(best, best_ids)), tl.sum(mass)


@triton.jit
def _mass_of_part(
    row, words, start, stop, row_max, scale, DEPTH: tl.constexpr, LANES: tl.constexpr, MASKED: tl.constexpr
):
    """The mass of a part of a row that does not race: in longer tiles, as there is nothing to decide."""
    # With MASKED only tokens count whose bit in the row's words is 1.
    number = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    mass = tl.zeros((LANES,), tl.int64)
    for at in range(start, stop, DEPTH * LANES):
        x = last_look(row + at + number, number < stop - at).to(tl.float32)
        if MASKED:
            x = _unmasked_tile(x, words, at, stop)
        mass += tl.sum(exp2_mass(x, row_max, scale), 0)
    return tl.sum(mass)


@triton.jit
def _races_here(known, races, top_k, vocab_size, LISTED_TOP_K: tl.constexpr):
    """Whether rows race that may have a winner already, of an earlier race."""
    return (known == NO_WINNER) & races & races_over_row(top_k, vocab_size, LISTED_TOP_K)


@triton.jit
def load_scoring(scoring_arrays, index):
    """The ``scoring`` of a row, of the arrays ``(row_maxima, min_ps, scales, noise_masks, noise_keys)``."""
    row_maxima, min_ps, scales, noise_masks, noise_keys = scoring_arrays
    firsts, seconds, thirds, fourths = noise_keys
    row_max, min_p = finite(tl.load(row_maxima + index)), tl.load(min_ps + index)
    scale, noise_mask = tl.load(scales + index), tl.load(noise_masks + index)
    first, second = tl.load(firsts + index), tl.load(seconds + index)
    third, fourth = tl.load(thirds + index), tl.load(fourths + index)
    return row_max, min_p, scale, noise_mask, (first, second, third, fourth)


@triton.jit
def _race_row(
    logits, row_stride, masks, rows, earlier, results, index, part, vocab_size, tiles, DEPTH: tl.constexpr,
    LANES: tl.constexpr, MASS_DEPTH: tl.constexpr, LISTED_TOP_K: tl.constexpr, SOME_RACED: tl.constexpr,
    SOME_FOUND: tl.constexpr, WEIGHS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """``race_kernel`` for a row."""
    part_winners, part_masses = results
    raced, founds = earlier
    races, top_ks, scoring_arrays = rows
    place = index * tl.num_programs(1) + part
    known = tl.full((), NO_WINNER, tl.int64)
    if SOME_RACED:
        known = tl.load(raced + place)
    races_here = _races_here(known, tl.load(races + index), tl.load(top_ks + index), vocab_size, LISTED_TOP_K)
    row, start = logits + index.to(tl.int64) * row_stride, part * tiles * (DEPTH * LANES)
    words, word_stride = masks
    words += index.to(tl.int64) * word_stride
    if races_here:
        reached = tl.full((), MASKED_KEY, tl.int32)
        if SOME_FOUND:
            reached = tl.maximum(packed_key(tl.load(founds + index)), LOWEST_KEY) - 1
        known, mass = _race_part(
            row, words, start, tiles, reached, load_scoring(scoring_arrays, index), vocab_size, DEPTH, LANES, WEIGHS,
            MASKED,
        )  # fmt: skip
        if WEIGHS:
            tl.store(part_masses + place, mass)
    elif WEIGHS:
        row_maxima, _min_ps, scales, _noise_masks, _noise_keys = scoring_arrays
        stop = tl.minimum(start + tiles * (DEPTH * LANES), vocab_size)
        row_max = finite(tl.load(row_maxima + index))
        mass = _mass_of_part(row, words, start, stop, row_max, tl.load(scales + index), MASS_DEPTH, LANES, MASKED)
        tl.store(part_masses + place, mass)
    tl.store(part_winners + place, known)


@kernel
def race_kernel(
    logits, row_stride, races, row_maxima, scales, top_ks, noise_masks, min_ps, firsts, seconds, thirds, fourths,
    raced, founds, words, word_stride, part_winners, part_masses, open_rows, num_rows, vocab_size, tiles,
    DEPTH: tl.constexpr, LANES: tl.constexpr, MASS_DEPTH: tl.constexpr, LISTED_TOP_K: tl.constexpr,
    SOME_RACED: tl.constexpr, SOME_FOUND: tl.constexpr, WEIGHS: tl.constexpr, MASKED: tl.constexpr,
    GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best packed (score key, id) that min_p keeps, or ``NO_WINNER``, of a part of each of ``GROUP`` rows.

    Reads:
        logits ``[R, >=V]``, ``row_stride`` numbers a row; each row's races (bool, whether it races if its top-k is
        above LISTED_TOP_K), row_maxima, scales, top_ks, noise_masks, min_ps, and noise keys firsts to fourths ``[R]``.
        raced: int64 ``[R, parts]``, winners of an earlier race or ``NO_WINNER``, with SOME_RACED.
        founds: int64 ``[R]``, packed (score key, id) of a token of each row, with SOME_FOUND.
        words: int32 ``[R, >= ceil(V / 32)]``, ``word_stride`` numbers a row, a bit for each token, with MASKED.
    Writes:
        part_winners: int64 ``[R, parts]``.
        part_masses: int64 ``[R, parts]``, with WEIGHS, also of rows that do not race.
        open_rows: its first number, 0, so that ``bracket_kernel`` fills an empty list.
    Grid:
        ``(ceil(R / GROUP), parts)``; a part is ``tiles`` tiles of DEPTH * LANES tokens, of one warp.
    Flags:
        MASS_DEPTH: of the tiles of rows that are only weighed.
        LISTED_TOP_K: top-k up to which no row races here.
        SOME_RACED: copy the winners in ``raced`` and let only the other rows race.
        SOME_FOUND: a part may name any token, or none, if it has no score as good as that of its row in ``founds``.
        WEIGHS: measure every row's mass in the same pass.
        MASKED: no token races or weighs anything whose bit is 0.
        EARLY: starts while the kernel before ends, and waits for that end.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    scoring_arrays = (row_maxima, min_ps, scales, noise_masks, (firsts, seconds, thirds, fourths))
    row_arrays = (races, top_ks, scoring_arrays)
    first, part = tl.program_id(0) * GROUP, tl.program_id(1)
    if first + part == 0:
        tl.store(open_rows, 0)
    works = WEIGHS
    if not WEIGHS:  # mostly no row of the group races: then the program has looked at all of them at once, and ends
        rows = first + tl.arange(0, GROUP)
        inside, places = rows < num_rows, rows * tl.num_programs(1) + part
        known = tl.full((GROUP,), NO_WINNER, tl.int64)
        if SOME_RACED:
            known = tl.load(raced + places, inside)
        may_race, top_k = tl.load(races + rows, inside, 0) != 0, tl.load(top_ks + rows, inside, 0)
        races_here = inside & _races_here(known, may_race, top_k, vocab_size, LISTED_TOP_K)
        tl.store(part_winners + places, known, inside)
        works = tl.max(races_here.to(tl.int32), 0) > 0
    if works:
        for place in range(GROUP):
            index = first + place
            if index < num_rows:
                _race_row(
                    logits, row_stride, (words, word_stride), row_arrays, (raced, founds), (part_winners, part_masses),
                    index, part, vocab_size, tiles, DEPTH, LANES, MASS_DEPTH, LISTED_TOP_K, SOME_RACED, SOME_FOUND,
                    WEIGHS, MASKED,
                )  # fmt: skip
