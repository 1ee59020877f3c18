"""The race over whole rows on CUDA, for the rows of a batch whose kept tokens may lie beyond the candidates.

Inductor's kernels cannot skip a row. This one does: a row that needs no race costs the start of a few programs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from compiled_sampler.wide_keys_triton import ANYWHERE, early, finite, key_float
from compiled_sampler.wide_noise_triton import gumbel

_DEPTH, _LANES = 8, 128  # a tile: tokens a thread, threads

_BITS_OF_128 = tl.constexpr(0x43000000)
_POSITIVE_INFINITY_KEY = tl.constexpr(0x7F800000)


@triton.jit
def _score_bits(x, ids, scale, noise_mask, first, second, third, fourth):
    """``draw.score_bits``."""
    noise = gumbel(ids, first, second, third, fourth)
    noise = (noise.to(tl.int32, bitcast=True) & noise_mask).to(tl.float32, bitcast=True)
    score = x * scale + noise
    infinite = (noise + 192.0).to(tl.int32, bitcast=True) + (_POSITIVE_INFINITY_KEY - _BITS_OF_128)
    return tl.where(score == float("inf"), infinite, score.to(tl.int32, bitcast=True))


@triton.jit
def _key(x, ids, keep, scale, noise_mask, first, second, third, fourth):
    """Score keys of tokens; that of a masked one unless ``keep``."""
    bits = _score_bits(x, ids, scale, noise_mask, first, second, third, fourth)
    return tl.where(keep, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)


@triton.jit
def _is_admitted(x, ids, row_max, scale, min_p, last, last_id):
    """Where a token passes the filters, as in ``draw.admitted_bits``."""
    keep = (x > float("-inf")) & ((x - row_max) * scale >= min_p)
    return keep & ((x > last) | ((x == last) & (ids <= last_id)))


@triton.jit
def _all_listed(brackets, sums, top_p, threshold, CAPACITY: tl.constexpr):
    """Whether the list of a row holds all tokens up to the threshold."""
    place = tl.where(top_p < 1.0, 2, 0)
    first, last = tl.load(brackets + place), tl.load(brackets + place + 1)
    is_whole = (tl.load(brackets + 4) == 1) & (first < last) & (tl.load(sums + 5) <= CAPACITY)
    return is_whole & ((threshold >> 32) >= first)


@triton.jit(do_not_specialize=["row_stride", "vocab_size", "tiles"], do_not_specialize_on_alignment=ANYWHERE)
def _race_kernel(
    logits, row_stride, races, pendings, row_maxima, scales, top_ps, noise_masks, min_ps, firsts, seconds, thirds,
    fourths, thresholds, brackets, sums, list_keys, list_ids, winners, vocab_size, tiles, DEPTH: tl.constexpr,
    LANES: tl.constexpr, CAPACITY: tl.constexpr, SUMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best packed (score key, id) of a part of a row; the smallest number where the row does not race."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    index, part = tl.program_id(0), tl.program_id(1)
    winner = winners + index * tl.num_programs(1) + part
    if tl.load(races + index):
        row = logits + index.to(tl.int64) * row_stride
        keys, tokens = list_keys + index.to(tl.int64) * CAPACITY, list_ids + index.to(tl.int64) * CAPACITY
        row_max = finite(tl.load(row_maxima + index))
        scale, noise_mask = tl.load(scales + index), tl.load(noise_masks + index)
        min_p = tl.load(min_ps + index)
        first, second = tl.load(firsts + index), tl.load(seconds + index)
        third, fourth = tl.load(thirds + index), tl.load(fourths + index)
        threshold = tl.load(thresholds + index)
        last = key_float((threshold >> 32).to(tl.int32))
        last_id = 2147483647 - (threshold & 0x7FFFFFFF).to(tl.int32)
        number = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        best = tl.full((DEPTH, LANES), -2147483648, tl.int32)
        best_ids = number
        listed = tl.load(pendings + index)
        if listed:
            listed = _all_listed(
                brackets + index * 8, sums + index * SUMS, tl.load(top_ps + index), threshold, CAPACITY
            )
        if listed:
            size = tl.load(sums + index * SUMS + 5).to(tl.int32)
            for start in range(part * (DEPTH * LANES), size, tl.num_programs(1) * (DEPTH * LANES)):
                inside = start + number < size
                x = key_float(tl.load(keys + start + number, mask=inside, other=-2147483648))
                ids = tl.load(tokens + start + number, mask=inside, other=0)
                keep = _is_admitted(x, ids, row_max, scale, min_p, last, last_id)
                key = _key(x, ids, keep, scale, noise_mask, first, second, third, fourth)
                is_better = (key > best) | ((key == best) & (ids < best_ids))  # lists have no order
                best_ids = tl.where(is_better, ids, best_ids)
                best = tl.maximum(key, best)
        else:
            ids = part * tiles * (DEPTH * LANES) + number
            x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
            for _ in range(tiles):
                next_ids = ids + DEPTH * LANES
                next_x = tl.load(row + next_ids, mask=next_ids < vocab_size, other=float("-inf"))  # while x is used
                x = x.to(tl.float32)
                keep = _is_admitted(x, ids, row_max, scale, min_p, last, last_id)
                key = _key(x, ids, keep, scale, noise_mask, first, second, third, fourth)
                best_ids = tl.where(key > best, ids, best_ids)
                best = tl.maximum(key, best)
                x = next_x
                ids = next_ids
        packed = (best.to(tl.int64) << 32) | (2147483647 - best_ids).to(tl.int64)
        tl.store(winner, tl.max(packed))
    else:
        tl.store(winner, -9223372036854775808)


@triton_op("compiled_sampler::wide_race", mutates_args=())
def wide_race(
    logits: Tensor,
    races: Tensor,
    pending: Tensor,
    row_max: Tensor,
    scale: Tensor,
    top_p: Tensor,
    noise_mask: Tensor,
    min_p_log2: Tensor,
    keys: list[Tensor],
    threshold: Tensor,
    lists: list[Tensor],
    vocab_size: int,
    parts: int,
) -> Tensor:
    """The best packed key of each part of a row: int64 ``[R, parts]``; arguments as ``wide_race.race_beyond``.

    Without lists no row may be pending.
    """
    num_rows, num_tiles = logits.shape[0], triton.cdiv(vocab_size, _DEPTH * _LANES)
    winners = threshold.new_empty((num_rows, parts))
    nothing = noise_mask.view(-1, 1)
    brackets, sums, list_keys, list_ids = lists or (nothing, winners, nothing, nothing)  # which no row will read
    wrap_triton(_race_kernel)[(num_rows, parts)](
        logits, logits.stride(0), races, pending, row_max, scale, top_p, noise_mask, min_p_log2, *keys, threshold,
        brackets, sums, list_keys, list_ids, winners, vocab_size, triton.cdiv(num_tiles, parts),
        DEPTH=_DEPTH, LANES=_LANES, CAPACITY=list_keys.shape[1], SUMS=sums.shape[1],
        num_warps=_LANES // 32, enable_fp_fusion=False, **early(logits.device),
    )  # fmt: skip
    return winners
