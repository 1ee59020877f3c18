"""The wide path on CUDA: one Triton program a row searches the threshold that ``wide.sorted_threshold`` defines.

The one hand-written kernel of the library. A search for a key by bisection needs a data-dependent number of passes over
a row, which fixed torch passes cannot stop: 32 passes for every row, needed or not, against none for rows whose filters
end within the candidates. A row's program keeps the bracket on tokens that exist, so it ends after about log2 of the
number of distinct logits between the brackets; ties at the threshold are then cut by id. Weights follow ``mass.py``
operation by operation; the launch turns FMA contraction off.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from compiled_sampler.mass import EXP2, FLOAT_MAX

_TILE = 4096
_C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in EXP2[1:])
_FLOAT_MAX = tl.constexpr(FLOAT_MAX)


@triton.jit
def _keys(row, start, vocab_size, TILE: tl.constexpr):
    """Order keys and logits of a tile; the key is -2**31 outside the row and for -inf and NaN."""
    ids = start + tl.arange(0, TILE)
    x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return tl.where(x > float("-inf"), key, -2147483648).to(tl.int64), x, ids


@triton.jit
def _weight(x, row_max, scale):
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
def _weigh(x, row_max, scale, MASS: tl.constexpr):
    if MASS:
        return _weight(x, row_max, scale)
    else:
        return tl.full(x.shape, 1, tl.int64)


@triton.jit
def _search(row, row_max, scale, top_key, limit, vocab_size, MASS: tl.constexpr, TILE: tl.constexpr):
    """The last packed key with less than ``limit`` weight above it (int64: key in the high, id in the low word)."""
    high = top_key  # less than the limit lies above it
    low = tl.full((), -2147483649, tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        above = tl.zeros((TILE,), tl.int64)
        next_above = tl.full((TILE,), 2147483647, tl.int64)
        next_below = tl.full((TILE,), -2147483648, tl.int64)
        for start in range(0, vocab_size, TILE):
            key, x, ids = _keys(row, start, vocab_size, TILE)
            is_above = (key > middle) & (ids < vocab_size)
            above += tl.where(is_above, _weigh(x, row_max, scale, MASS), 0)
            next_above = tl.minimum(next_above, tl.where(is_above, key, 2147483647))
            next_below = tl.maximum(next_below, tl.where(is_above, -2147483648, key))
        enough = tl.sum(above) >= limit
        low = tl.where(enough, tl.min(next_above) - 1, low)
        high = tl.where(enough, high, tl.max(next_below))
    above = tl.zeros((TILE,), tl.int64)
    tie_weight = tl.zeros((TILE,), tl.int64)
    for start in range(0, vocab_size, TILE):
        key, x, ids = _keys(row, start, vocab_size, TILE)
        inside = ids < vocab_size
        weight = _weigh(x, row_max, scale, MASS)
        above += tl.where((key > high) & inside, weight, 0)
        tie_weight = tl.maximum(tie_weight, tl.where((key == high) & inside, weight, 0))
    weight = tl.max(tie_weight)
    missing = limit - tl.sum(above)
    needed = tl.where(weight > 0, (missing + weight - 1) // tl.maximum(weight, 1), vocab_size)
    last = tl.zeros((), tl.int32) + vocab_size - 1  # ties up to this id are enough
    first = tl.full((), -1, tl.int32)  # ties up to this id are too few
    while last - first > 1:
        middle = (first + last) >> 1
        ties = tl.zeros((TILE,), tl.int64)
        for start in range(0, middle + 1, TILE):
            key, _, ids = _keys(row, start, vocab_size, TILE)
            ties += tl.where((key == high) & (ids <= middle), 1, 0)
        enough = tl.sum(ties) >= needed
        last = tl.where(enough, middle, last)
        first = tl.where(enough, first, middle)
    return (high << 32) | (2147483647 - last).to(tl.int64)


@triton.jit
def _prefix_mass(row, row_max, scale, threshold, vocab_size, TILE: tl.constexpr):
    """Mass of the tokens whose packed key reaches the threshold."""
    total = tl.zeros((TILE,), tl.int64)
    for start in range(0, vocab_size, TILE):
        key, x, ids = _keys(row, start, vocab_size, TILE)
        packed = (key << 32) | (2147483647 - ids).to(tl.int64)
        total += tl.where((packed >= threshold) & (ids < vocab_size), _weight(x, row_max, scale), 0)
    return tl.sum(total)


@triton.jit(
    do_not_specialize_on_alignment=["logits", "scales", "top_ks", "top_ps", "pendings", "thresholds"]
)  # another alignment would compile inside an engine's capture
def _threshold_kernel(
    logits, row_stride, scales, top_ks, top_ps, pendings, thresholds, vocab_size,
    BASE_IS_ROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Replace the threshold of a pending row by the exact one."""
    index = tl.program_id(0)
    if tl.load(pendings + index):
        row = logits + index.to(tl.int64) * row_stride
        scale = tl.load(scales + index)
        top_k = tl.load(top_ks + index)
        top_p = tl.load(top_ps + index)
        best = tl.full((TILE,), -2147483648, tl.int64)
        largest = tl.full((TILE,), float("-inf"), tl.float32)
        for start in range(0, vocab_size, TILE):
            key, x, _ = _keys(row, start, vocab_size, TILE)
            best = tl.maximum(best, key)
            largest = tl.maximum(largest, tl.where(key > -2147483648, x, float("-inf")))
        top_key = tl.max(best)
        row_max = tl.minimum(tl.maximum(tl.max(largest), -_FLOAT_MAX), _FLOAT_MAX)
        threshold = tl.full((), -9223372036854775808, tl.int64)
        if top_k < vocab_size:
            threshold = _search(row, row_max, scale, top_key, top_k, vocab_size, False, TILE)
        if top_p < 1.0:
            base_threshold = threshold
            if BASE_IS_ROW:
                base_threshold = tl.full((), -9223372036854775808, tl.int64)
            base = _prefix_mass(row, row_max, scale, base_threshold, vocab_size, TILE)
            product = top_p * base.to(tl.float64)
            cut = product.to(tl.int64)
            cut += tl.where(cut.to(tl.float64) < product, 1, 0)
            found = _search(row, row_max, scale, top_key, cut, vocab_size, True, TILE)
            threshold = tl.maximum(threshold, found)
        tl.store(thresholds + index, threshold)


@triton_op("compiled_sampler::wide_search", mutates_args=())
def wide_search(
    logits: Tensor,
    packed: Tensor,
    pending: Tensor,
    scale: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    vocab_size: int,
    base_is_row: bool,
) -> Tensor:
    """The threshold of every row, searching the pending ones; arguments as ``wide.wide_threshold``."""
    thresholds = packed.clone()
    wrap_triton(_threshold_kernel)[(logits.shape[0],)](
        logits, logits.stride(0), scale, top_k, top_p, pending, thresholds, vocab_size,
        BASE_IS_ROW=base_is_row, TILE=_TILE, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return thresholds
