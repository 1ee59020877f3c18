"""The noise of the race in Triton, as ``noise.py`` defines it, operation by operation."""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.core.arithmetic.polynomial import MAGIC, MAGIC_BITS
from compiled_sampler.core.noise import BIAS, BITS_OF_MINUS_2_31, BOUND, HALF_LOG, LOG, MIX_1, MIX_2, SIGN_BIT, STEP

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
