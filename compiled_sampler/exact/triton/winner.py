"""Whether a row's filters keep the winner of its race, and who wins if they do not, on CUDA.

Top-p keeps a token if ``mass_before < cut``. Let ``mass_from`` be the mass of the token and of all after it in the
order: ``mass_before + mass_from == row_mass``, so top-p keeps the token if ``mass_from > row_mass - cut``. Samples of
the row that hold so much mass from the winner on prove that the winner is kept, without a search. Masses are exact
integers, so a proof holds; without one, all of the row is measured.

Once brackets are measured, the best winner that is left is kept or it is not. If it is not, neither is anything behind
it, so its part of the row races again, among the tokens before it. Few parts do: of the tokens with better scores than
the row's winner, those that are dropped. A row whose kept tokens are listed has its list in place of parts.

Whether a token is kept says the threshold, or, where a single filter's bracket is exact, the weight before the token:
what is above the bracket, and what is before it in the list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.exact.triton.race import score_key
from compiled_sampler.exact.triton.rows import (
    MASKED_KEY,
    NO_WINNER,
    UNKNOWN_WINNER,
    exp2_mass,
    finite,
    for_mask,
    key_float,
    load_logits,
    mass_cut,
    order_key,
    pack,
    packed_id,
    packed_key,
)
from compiled_sampler.exact.triton.search import STREAM, load_tile, masses


@triton.jit
def is_dropped(mass_from, row_mass, top_p):
    """Whether top-p drops a token, or may, by the mass of the row from it on, or a part of that."""
    return mass_from <= row_mass - mass_cut(top_p, row_mass)


@triton.jit
def sample_ids(vocab_size, SAMPLE: tl.constexpr, RUN: tl.constexpr):
    """Tokens all over a row in runs of neighbours, int32 ``[SAMPLE]``; the n-th sample after it is ``n * RUN`` on."""
    number = tl.arange(0, SAMPLE)
    run = (number // RUN).to(tl.int64) * vocab_size // (SAMPLE // RUN)
    return run.to(tl.int32) + number % RUN


@triton.jit
def sample(row, words, is_wanted, vocab_size, SAMPLE: tl.constexpr, RUN: tl.constexpr, MASKED: tl.constexpr):
    """Logits of the ``sample_ids`` of a row; -inf beyond its end, and nothing is read unless it is wanted."""
    ids = sample_ids(vocab_size, SAMPLE, RUN)
    return load_logits(row, words, ids, (ids < vocab_size) & for_mask(is_wanted), MASKED)


@triton.jit
def _is_shown_to_be_kept(
    row, words, winner_logit, token, row_mass, row_max, scale, top_p, vocab_size, SAMPLE: tl.constexpr,
    RUN: tl.constexpr, MAX_SAMPLES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Whether samples show that top-p keeps a token: up to ``MAX_SAMPLES``, while these would do at the rate so far."""
    most = tl.minimum(vocab_size // SAMPLE, MAX_SAMPLES)  # more would overlap
    ids = sample_ids(vocab_size, SAMPLE, RUN)
    needed = (row_mass - mass_cut(top_p, row_mass)).to(tl.float32)
    is_shown = most < 0
    seen, samples = tl.zeros((), tl.int64), tl.zeros((), tl.int32)
    goes_on = most > 0
    while goes_on:
        x = load_logits(row, words, ids, ids < vocab_size, MASKED).to(tl.float32)
        is_after = (x < winner_logit) | ((x == winner_logit) & (ids >= token))
        seen += tl.sum(tl.where(is_after, exp2_mass(x, row_max, scale), 0))
        ids += RUN
        samples += 1
        is_shown = is_dropped(seen, row_mass, top_p) == 0
        will_do = seen.to(tl.float32) * most.to(tl.float32) > needed * samples.to(tl.float32)
        goes_on = (is_shown == 0) & (samples < most) & will_do
    return is_shown


# ``winner`` is int64, packed (score key, id). ``place`` takes its order key, int32; what is not proven
# MASS_AFTER_WINNER decides. Where top_k is below V there is no proof, and where it is not, top_p is below 1.
# A sample has SAMPLE tokens in runs of RUN neighbours; a proof takes at most MAX_SAMPLES of them.
@triton.jit
def needs_search(
    row, words, winner, parameters, place, vocab_size, SAMPLE: tl.constexpr, RUN: tl.constexpr,
    MAX_SAMPLES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Whether the winner of the race over a row may be another under its filters."""
    row_mass, row_max, scale, top_k, top_p = parameters
    has_winner = (winner >> 32) > MASKED_KEY  # a row without tokens needs no search
    is_open = (top_k < vocab_size) | has_winner
    if (top_k >= vocab_size) & has_winner:
        token = packed_id(winner)
        winner_logit = tl.load(row + token).to(tl.float32)
        tl.store(place, order_key(winner_logit))
        shown = _is_shown_to_be_kept(
            row, words, winner_logit, token, row_mass, finite(row_max), scale, top_p, vocab_size, SAMPLE, RUN,
            MAX_SAMPLES, MASKED,
        )  # fmt: skip
        is_open = shown == 0
    return is_open


@triton.jit
def _is_before(key, ids, other, other_id):
    """Whether tokens stand in the order before another."""
    return (key > other) | ((key == other) & (ids < other_id))


@triton.jit
def _weight_before(row, listed, size, last, winner_key, token, scaling, of_mass, LANES: tl.constexpr):
    """Mass or number of the list's tokens before one, up to the key ``last``."""
    total = tl.zeros((LANES,), tl.int64)
    for at in range(0, size, LANES * STREAM):
        key, other, inside = load_tile(row, listed, True, at, size, LANES, STREAM, False)
        counts = inside & (key <= last) & _is_before(key, other, winner_key, token)
        if of_mass:
            total += tl.sum(tl.where(counts, masses(key, scaling), 0), 0)
        else:
            total += tl.sum(counts.to(tl.int64), 0)
    return tl.sum(total)


# ``is_listed`` is whether the list holds all tokens that are kept. ``threshold`` is int64, the last packed key that is
# kept; it decides where ``is_exact``, elsewhere ``boundary`` of the only filter, ``(first, last, above, limit,
# of_mass)``: where its bracket is; the weight above it, which is below the limit; the weight before a token that is
# not kept, int64, reached within the bracket; and whether weights are masses rather than all 1. ``parts`` of the race
# over the row are ``(part_winners, num_parts, part_size, raced)``: int64 ``[num_parts]``, of so many tokens each, if
# there was a race.
@triton.jit
def winner_under_filters(
    row, listed, list_size, is_listed, boundary, threshold, is_exact, parts, scoring, vocab_size, LANES: tl.constexpr,
    MAX_PARTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The best packed (score key, id) of a row among the tokens that its filters keep."""
    logits, _words = row
    first_key, last_key, above, limit, of_mass = boundary
    part_winners, num_parts, part_size, raced = parts
    row_max, _min_p, scale, _noise_mask, _noise_keys = scoring
    bound = tl.where(is_exact, packed_key(threshold), MASKED_KEY)  # tokens from here on are dropped
    bound_id = tl.where(is_exact, packed_id(threshold) + 1, 0)
    part = tl.arange(0, MAX_PARTS)
    size = tl.where(is_listed, list_size, vocab_size).to(tl.int32)
    in_parts = raced & (is_listed == 0)
    part_size = tl.where(in_parts, part_size, size)
    best = tl.load(part_winners + part, mask=for_mask(in_parts) & (part < num_parts), other=NO_WINNER)
    best = tl.where((in_parts == 0) & (part == 0), UNKNOWN_WINNER, best)
    winner = tl.max(best)
    is_done = (winner >> 32) == MASKED_KEY
    while is_done == 0:
        token = packed_id(winner)
        is_kept = winner < UNKNOWN_WINNER
        winner_key = order_key(tl.load(logits + token, mask=is_kept, other=float("-inf")).to(tl.float32))
        is_kept = is_kept & _is_before(winner_key, token, bound, bound_id)
        if is_kept & (is_exact == 0):
            if winner_key <= last_key:
                before = above + _weight_before(
                    row, listed, list_size.to(tl.int32), last_key, winner_key, token, (row_max, scale), of_mass, LANES
                )
                is_kept = (winner_key >= first_key) & (before < limit)
            bound = tl.where(is_kept, bound, winner_key)
            bound_id = tl.where(is_kept, bound_id, token)
        is_done = is_kept
        if is_kept == 0:
            which = tl.sum(tl.where(best == winner, part, 0))  # winners differ
            start = which * part_size
            stop = tl.minimum(start + part_size, size)
            best_key = tl.full((STREAM, LANES), MASKED_KEY, tl.int32)
            best_ids = best_key - MASKED_KEY
            for at in range(start, stop, LANES * STREAM):
                order, token_ids, inside = load_tile(row, listed, is_listed, at, stop, LANES, STREAM, MASKED)
                keep = inside & _is_before(order, token_ids, bound, bound_id)
                key = score_key(key_float(order), token_ids, keep, scoring)
                is_better = (key > best_key) | ((key == best_key) & (token_ids < best_ids))  # lists have no order
                best_ids = tl.where(is_better, token_ids, best_ids)
                best_key = tl.maximum(key, best_key)
            best = tl.where(part == which, tl.max(pack(best_key, best_ids)), best)
            winner = tl.max(best)
            is_done = (winner >> 32) == MASKED_KEY
    return winner
