"""Who wins the race of a row under its filters, once brackets are measured, on CUDA.

The best winner that is left is kept or it is not. If it is not, neither is anything behind it, so its part of the row
races again, among the tokens before it. Few parts do: of the tokens with better scores than the row's winner, those
that are dropped. A row whose kept tokens are listed has its list in place of parts.

Whether a token is kept says the threshold, or, where a single filter's bracket is exact, the weight before the token:
what is above the bracket, and what is before it in the list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.exact.triton.keys import key_float, order_key
from compiled_sampler.exact.triton.race import MASKED_KEY, NO_WINNER, best_of, score_key
from compiled_sampler.exact.triton.search import STREAM, load_tile, masses

_UNKNOWN = tl.constexpr(9223372036854775807)  # above every winner


@triton.jit
def _is_before(key, ids, other, other_id):
    """Whether tokens stand in the order before another."""
    return (key > other) | ((key == other) & (ids < other_id))


@triton.jit
def _weight_before(row, listed, size, last, its, token, row_max, scale, of_mass, LANES: tl.constexpr):
    """Mass or number of the list's tokens before one, up to the key ``last``."""
    total = tl.zeros((LANES,), tl.int64)
    for at in range(0, size, LANES * STREAM):
        key, other, inside = load_tile(row, listed, True, at, size, LANES, STREAM)
        counts = inside & (key <= last) & _is_before(key, other, its, token)
        if of_mass:
            total += tl.sum(tl.where(counts, masses(key, row_max, scale), 0), 0)
        else:
            total += tl.sum(counts.to(tl.int64), 0)
    return tl.sum(total)


@triton.jit
def settled(
    row, listed, list_size, brackets, above, limit, of_mass, is_exact, threshold, is_listed, vocab_size,
    part_winners, num_parts, part_size, raced, row_max, scale, noise_mask, min_p, first, second, third, fourth,
    LANES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The best packed (score key, id) of a row among the tokens that its filters keep.

    Args:
        row: logits.
        listed: the list.
        list_size: tokens in it.
        brackets: of the filter, first and last key.
        above: weight above the bracket, int64, below the limit.
        limit: weight before a token that is not kept, int64; reached within the bracket.
        of_mass: whether weights are masses rather than all 1.
        is_exact: whether the threshold decides instead of the bracket.
        threshold: int64, the last packed key that is kept.
        is_listed: whether the list holds all tokens that are kept.
        vocab_size: V.
        part_winners: of the race over the row, int64 ``[num_parts]``.
        num_parts: of the row.
        part_size: tokens a part.
        raced: whether there was a race.
        row_max: finite maximum of the row.
        scale: of the row.
        noise_mask: of the row.
        min_p: its base-2 logarithm.
        first: key of the row's noise.
        second: the next.
        third: the next.
        fourth: the last.
        LANES: threads.
        PARTS: of a row, at most.
    """
    first_key, last_key = tl.load(brackets), tl.load(brackets + 1)
    bound = tl.where(is_exact, (threshold >> 32).to(tl.int32), MASKED_KEY)  # tokens from here on are dropped
    bound_id = tl.where(is_exact, 2147483647 - (threshold & 0x7FFFFFFF).to(tl.int32) + 1, 0)
    part = tl.arange(0, PARTS)
    size = tl.where(is_listed, list_size, vocab_size).to(tl.int32)
    in_parts = raced & (is_listed == 0)
    part_size = tl.where(in_parts, part_size, size)
    best = tl.load(part_winners + part, mask=in_parts & (part < num_parts), other=NO_WINNER)
    best = tl.where((in_parts == 0) & (part == 0), _UNKNOWN, best)
    winner = tl.max(best)
    is_done = (winner >> 32) == MASKED_KEY
    while is_done == 0:
        token = 2147483647 - (winner & 0x7FFFFFFF).to(tl.int32)
        is_kept = winner < _UNKNOWN
        its = order_key(tl.load(row + token, mask=is_kept, other=float("-inf")).to(tl.float32))
        is_kept = is_kept & _is_before(its, token, bound, bound_id)
        if is_kept & (is_exact == 0):
            if its <= last_key:
                before = above + _weight_before(
                    row, listed, list_size.to(tl.int32), last_key, its, token, row_max, scale, of_mass, LANES
                )
                is_kept = (its >= first_key) & (before < limit)
            bound = tl.where(is_kept, bound, its)
            bound_id = tl.where(is_kept, bound_id, token)
        is_done = is_kept
        if is_kept == 0:
            which = tl.sum(tl.where(best == winner, part, 0))  # winners differ
            start = which * part_size
            stop = tl.minimum(start + part_size, size)
            best_key = tl.full((STREAM, LANES), MASKED_KEY, tl.int32)
            best_ids = best_key - MASKED_KEY
            for at in range(start, stop, LANES * STREAM):
                order, token_ids, inside = load_tile(row, listed, is_listed, at, stop, LANES, STREAM)
                keep = inside & _is_before(order, token_ids, bound, bound_id)
                key = score_key(
                    key_float(order), token_ids, keep, row_max, min_p, scale, noise_mask, first, second, third, fourth
                )
                is_better = (key > best_key) | ((key == best_key) & (token_ids < best_ids))  # lists have no order
                best_ids = tl.where(is_better, token_ids, best_ids)
                best_key = tl.maximum(key, best_key)
            best = tl.where(part == which, best_of(best_key, best_ids), best)
            winner = tl.max(best)
            is_done = (winner >> 32) == MASKED_KEY
    return winner
