"""The first half of the wide path on CUDA: where the key of a filter's last token may be, and what is there.

A bracket is the first and the last key, int32, between which that key probably lies. The sample that it comes from
decides how long the search takes, never what is found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.mass import EXP2, FLOAT_MAX

_C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in EXP2[1:])
_FLOAT_MAX = tl.constexpr(FLOAT_MAX)


@triton.jit
def order_key(x):
    """``order.order_key``."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x > float("-inf"), tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits), -2147483648)


@triton.jit
def key_float(key):
    """``order.key_float``; a NaN for keys that no logit has."""
    x = tl.where(key < 0, -2147483648 - key, key).to(tl.float32, bitcast=True)
    return tl.where(key == -2147483648, float("-inf"), x)


@triton.jit
def finite(row_max):
    """The maximum that ``mass.scaled_logits`` subtracts."""
    return tl.minimum(tl.maximum(row_max, -_FLOAT_MAX), _FLOAT_MAX)


@triton.jit
def exp2_mass(x, row_max, scale):
    """``mass.exp2_mass`` of the scaled logits."""
    t = (x - row_max) * scale
    t = tl.where(t > -64.0, t, -64.0)
    t = tl.where(t < 0.0, t, 0.0)
    shifted = t + 12582912.0
    f = t - (shifted - 12582912.0)
    p = _C5 * f + _C4
    p = p * f + _C3
    p = p * f + _C2
    p = p * f + _C1
    p = p * f + 1.0
    bits = p.to(tl.int32, bitcast=True) + ((shifted.to(tl.int32, bitcast=True) - 0x4B400000) << 23)
    shift = tl.minimum(127 - (bits >> 23), 63).to(tl.int64)
    return (((bits & 0x7FFFFF) | 0x800000).to(tl.int64) << 17) >> shift


@triton.jit
def _share(x, row_max, scale):
    """About ``2**t``, float32."""
    t = (x - row_max) * scale
    return tl.exp2(tl.minimum(tl.where(t > -126.0, t, -126.0), 0.0))


@triton.jit
def _tail(keys, shares, key, share, size, DEVIATIONS: tl.constexpr):
    """The sample's sum of shares up to a key, and how far it may be off; ``share`` is that of the key."""
    tail = tl.sum(tl.where(keys <= key, shares, 0.0))
    variance = tl.maximum(share * tail - tail * tail / size, 0.0) + 4.0 * share * share
    return tail, DEVIATIONS * tl.sqrt_rn(variance)


@triton.jit
def _guess(
    keys,
    shares,
    size,
    top,
    least,
    most,
    row_max,
    scale,
    MASS: tl.constexpr,
    STEPS: tl.constexpr,
    DEVIATIONS: tl.constexpr,
):
    """The first and the last key (int64) between which the tail reaches ``least`` to ``most``, as far as is likely."""
    low, low_end = tl.full((), -2147483649, tl.int64), top
    high_end, high = tl.full((), -2147483649, tl.int64), top
    lowest = tl.min(tl.where((shares > 0.0) & (keys > -2147483648), keys, 2147483647)).to(tl.int64) - 1
    below = tl.minimum(lowest, top)  # the first split parts the masked tokens from the others
    above = below
    for _ in range(STEPS):
        key = tl.maximum(below, -2147483648).to(tl.int32)
        tail, error = _tail(
            keys, shares, key, _share(key_float(key), row_max, scale) if MASS else 1.0, size, DEVIATIONS
        )
        is_below = tail + error < least
        low = tl.where(is_below, below, low)
        low_end = tl.where(is_below, low_end, below)
        key = tl.maximum(above, -2147483648).to(tl.int32)
        tail, error = _tail(
            keys, shares, key, _share(key_float(key), row_max, scale) if MASS else 1.0, size, DEVIATIONS
        )
        is_above = tail - error > most
        high = tl.where(is_above, above, high)
        high_end = tl.where(is_above, high_end, above)
        below = (low + low_end) >> 1
        above = (high_end + high) >> 1
    next_key = tl.min(tl.where(keys > tl.maximum(low, -2147483648).to(tl.int32), keys, 2147483647)).to(tl.int64)
    last_key = tl.max(tl.where(keys <= tl.maximum(high, -2147483648).to(tl.int32), keys, -2147483648)).to(tl.int64)
    # the bisections stop short of a single key: on to a key of the sample that they stopped before, or past
    first = tl.where(next_key <= low_end, next_key, low + 1)
    first = tl.maximum(first, -2147483647)  # masked tokens, often most of a row, fill no list
    high = tl.where((high < top) & (last_key > high_end), last_key, high)
    return tl.minimum(first, high), high


@triton.jit(
    do_not_specialize=["row_stride", "vocab_size"],
    do_not_specialize_on_alignment=[
        "logits",
        "row_maxima",
        "row_masses",
        "scales",
        "top_ks",
        "top_ps",
        "pendings",
        "packed",
        "thresholds",
    ],
)  # another alignment would compile inside an engine's capture
def guess_kernel(
    logits, row_stride, row_maxima, row_masses, scales, top_ks, top_ps, pendings, packed, thresholds, brackets, sums,
    vocab_size, BASE_IS_ROW: tl.constexpr, SAMPLE: tl.constexpr, RUN: tl.constexpr, STEPS: tl.constexpr,
    DEVIATIONS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Brackets (first and last key of top-k, then of top-p) of a pending row; the threshold of another."""
    index = tl.program_id(0)
    if tl.load(pendings + index):
        tl.store(sums + index * SUMS + tl.arange(0, SUMS), tl.zeros((SUMS,), tl.int64))
        scale = tl.load(scales + index)
        top_k = tl.load(top_ks + index)
        top_p = tl.load(top_ps + index)
        row_max = tl.load(row_maxima + index)
        top = order_key(row_max).to(tl.int64)
        row_max = finite(row_max)
        number = tl.arange(0, SAMPLE)
        ids = (number // RUN).to(tl.int64) * vocab_size // (SAMPLE // RUN) + number % RUN
        inside = ids < vocab_size
        x = tl.load(logits + index.to(tl.int64) * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
        keys = order_key(x)
        ones = tl.where(inside, 1.0, 0.0)
        size = tl.sum(ones)
        rate = size / vocab_size
        first, last = tl.full((), 2147483647, tl.int64), tl.full((), -2147483648, tl.int64)
        if top_k < vocab_size:
            tail = (vocab_size - top_k).to(tl.float32) * rate
            first, last = _guess(keys, ones, size, top, tail, tail, row_max, scale, False, STEPS, DEVIATIONS)
        tl.store(brackets + index * 4, first.to(tl.int32))
        tl.store(brackets + index * 4 + 1, last.to(tl.int32))
        if top_p < 1.0:
            shares = tl.where(inside, _share(x, row_max, scale), 0.0)
            row_mass = tl.load(row_masses + index).to(tl.float64) * 9.094947017729282e-13  # 2**-40
            least = ((1.0 - top_p) * row_mass).to(tl.float32) * rate
            most = least
            if (top_k < vocab_size) & (not BASE_IS_ROW):  # what top-k leaves out is no part of the base
                low, high = tl.maximum(first - 1, -2147483648).to(tl.int32), last.to(tl.int32)
                tail, error = _tail(keys, shares, low, _share(key_float(low), row_max, scale), size, DEVIATIONS)
                least += top_p.to(tl.float32) * tl.maximum(tail - error, 0.0)
                tail, error = _tail(keys, shares, high, _share(key_float(high), row_max, scale), size, DEVIATIONS)
                most += top_p.to(tl.float32) * (tail + error)
            first, last = _guess(keys, shares, size, top, least, most, row_max, scale, True, STEPS, DEVIATIONS)
            tl.store(brackets + index * 4 + 2, first.to(tl.int32))
            tl.store(brackets + index * 4 + 3, last.to(tl.int32))
        else:
            tl.store(brackets + index * 4 + 2, 2147483647)
            tl.store(brackets + index * 4 + 3, -2147483648)
    else:
        tl.store(thresholds + index, tl.load(packed + index))


@triton.jit(
    do_not_specialize=["row_stride", "vocab_size", "tiles"],
    do_not_specialize_on_alignment=["logits", "row_maxima", "scales", "top_ks", "top_ps", "pendings"],
)
def measure_kernel(
    logits, row_stride, row_maxima, scales, top_ks, top_ps, pendings, brackets, sums, list_keys, list_ids,
    vocab_size, tiles, DEPTH: tl.constexpr, LANES: tl.constexpr, CAPACITY: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Add a part of a row to its sums, and to its list the tokens inside a bracket of several keys.

    Sums: tokens above top-k's bracket, and with it; mass above top-k's bracket, above top-p's, and with it; list size.
    """
    index = tl.program_id(0)
    if tl.load(pendings + index):
        row = logits + index.to(tl.int64) * row_stride
        scale = tl.load(scales + index)
        row_max = finite(tl.load(row_maxima + index))
        use_k = tl.load(top_ks + index) < vocab_size
        use_p = tl.load(top_ps + index) < 1.0
        first_k, last_k = tl.load(brackets + index * 4), tl.load(brackets + index * 4 + 1)
        first_p, last_p = tl.load(brackets + index * 4 + 2), tl.load(brackets + index * 4 + 3)
        list_k = tl.where(first_k < last_k, first_k, 2147483647)
        list_p = tl.where(first_p < last_p, first_p, 2147483647)
        row_keys, row_ids = list_keys + index.to(tl.int64) * CAPACITY, list_ids + index.to(tl.int64) * CAPACITY
        number = tl.arange(0, LANES)[:, None] + tl.arange(0, DEPTH)[None, :] * LANES  # a thread holds a row of it
        above_k, with_k = tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32)
        mass_k, mass_p = tl.zeros((LANES,), tl.int64), tl.zeros((LANES,), tl.int64)
        with_p = tl.zeros((LANES,), tl.int64)
        ids = tl.program_id(1) * tiles * (DEPTH * LANES) + number
        x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
        for _ in range(tiles):
            inside = ids < vocab_size
            next_ids = ids + DEPTH * LANES
            next_x = tl.load(row + next_ids, mask=next_ids < vocab_size, other=float("-inf"))  # while this one is used
            x = x.to(tl.float32)
            key = order_key(x)
            if use_k:
                above_k += tl.sum((key > last_k).to(tl.int32), 1)
                with_k += tl.sum(((key >= first_k) & inside).to(tl.int32), 1)
            if use_p:
                weight = exp2_mass(x, row_max, scale)
                if use_k:
                    mass_k += tl.sum(tl.where(key > last_k, weight, 0), 1)
                mass_p += tl.sum(tl.where(key > last_p, weight, 0), 1)
                with_p += tl.sum(tl.where(key >= first_p, weight, 0), 1)
            is_listed = ((key >= list_k) & (key <= last_k)) | ((key >= list_p) & (key <= last_p))
            chosen = (is_listed & inside).to(tl.int32)
            lane_size = tl.sum(chosen, 1)
            size = tl.sum(lane_size)
            if size > 0:
                place = tl.atomic_add(sums + index * SUMS + 5, size.to(tl.int64), sem="relaxed").to(tl.int32)
                at = (place + tl.cumsum(lane_size, 0) - lane_size)[:, None] + tl.cumsum(chosen, 1) - chosen
                fits = (chosen > 0) & (at < CAPACITY)
                tl.store(row_keys + at, key, mask=fits)
                tl.store(row_ids + at, ids, mask=fits)
            x = next_x
            ids = next_ids
        if use_k:
            tl.atomic_add(sums + index * SUMS, tl.sum(above_k).to(tl.int64), sem="relaxed")
            tl.atomic_add(sums + index * SUMS + 1, tl.sum(with_k).to(tl.int64), sem="relaxed")
        if use_p:
            tl.atomic_add(sums + index * SUMS + 2, tl.sum(mass_k), sem="relaxed")
            tl.atomic_add(sums + index * SUMS + 3, tl.sum(mass_p), sem="relaxed")
            tl.atomic_add(sums + index * SUMS + 4, tl.sum(with_p), sem="relaxed")
