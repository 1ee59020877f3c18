"""Counter-based noise: a standard Gumbel variable (base 2) for every (seed, position, stream, token id).

The keys of a row come from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). A
32-bit permutation of three multiplications then mixes each token id with the keys of the row: first by a random odd
number, then as in the ``lowbias32`` construction with a key added after each. With fewer multiplications, pairs of ids
are measurably dependent over positions (``tools/noise.py`` tests the bits). Noise does not depend on the row's index,
its batch or the blocks that it is cut into.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.core.arithmetic import BIAS, MAGIC, MAGIC_BITS, exponent_and_fraction, polynomial
from compiled_sampler.modes import MOST_DRAWS

STREAM_VERSION = 1
"""Changes whenever any (seed, position, id, stream) gets other noise; golden vectors in the tests fix it."""

TARGET, DRAFT, ACCEPT, RESIDUAL, XTC = range(5)
"""Streams of noise: each is a separate word of the Philox counter, so that two streams cannot overlap."""

_STREAM_BITS = 8  # the stream is the low 8 bits of the counter's third word, a draft's offset in its block the rest;
# the version is the low 8 bits of the fourth, a draw's index among those of its position the rest
_WORD = 0xFFFFFFFF
_NEGATIVE_MULTIPLIERS = (0xD2511F53 - 2**32, 0xCD9E8D57 - 2**32)
"""Philox's multipliers minus 2**32, so that products stay within 63 bits: g++ assumes that int64 never overflows and
drops masks, which would change the noise in a large kernel. The high word then lacks the factor, which is added."""
_PHILOX_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B - 2**32

# HALF_LOG: -log2(1 + s/2) / s on [-1, 0], exact at 0, relative error 7.0e-6
# LOG: log2(1 + f) / f on [0, 1], exact at 1; absolute error of the log 1.2e-4
HALF_LOG = (
    -0.7213475108146667,
    0.18055862188339233,
    -0.05715257301926613,
    0.03500544652342796,
    0.012643519788980484,
    0.01857234537601471,
)
LOG = (1.4387257099151611, -0.6777840256690979, 0.32118895649909973, -0.08213070780038834)

SIGN_BIT = 256  # value of the sign when sign and exponent of a float are read as one number
BITS_OF_MINUS_2_31 = 0xCF000000 - 2**32
BOUND, STEP = 158.4716796875, 2.0**-23
"""BOUND is 32 bits plus the exponent's bias of 127 plus ``-log2(log2(e))``, rounded up by more than the error of
``gumbel``. STEP is the change of a float's base-2 logarithm per step of its bits."""


class NoiseKeys(NamedTuple):
    """The four 32-bit noise keys of a row, int32, each ``[R]`` or broadcastable to token ids; the first is odd."""

    first: Tensor
    second: Tensor
    third: Tensor
    fourth: Tensor


def philox_4x32_10(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The four output words of Philox4x32-10: int64 tensors that hold unsigned 32-bit words."""
    # counter: four int64 tensors of one shape, in [0, 2**32); key: two of them.
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):  # c1 and c3 keep their bits above 32 until a mask after the next round's xor drops them
        product0, product1 = c0 * _NEGATIVE_MULTIPLIERS[0], c2 * _NEGATIVE_MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) + c0, (product1 >> 32) + c2
        c0, c1, c2, c3 = (high1 ^ c1 ^ k0) & _WORD, product1, (high0 ^ c3 ^ k1) & _WORD, product0
        k0, k1 = k0 + _PHILOX_INCREMENTS[0], k1 + _PHILOX_INCREMENTS[1]
    return c0, c1 & _WORD, c2, c3 & _WORD


def noise_keys(
    seeds: Tensor,
    positions: Tensor,
    stream: int | Tensor,
    offsets: Tensor | None = None,
    draw_index: Tensor | None = None,
) -> NoiseKeys:
    """The four 32-bit noise keys of each row, int32 ``[R]`` each."""
    # offsets: how many tokens earlier the block of drafts began; None for 0. The noise of a block is keyed by the
    # position of the block and the offset in it, because a token that is drafted again after a rejection must not get
    # the noise that took part in that rejection.
    # draw_index: which of several draws of one position; None for 0.
    zero = torch.zeros_like(positions)
    domain, version = zero + stream, zero + STREAM_VERSION
    if offsets is not None:
        domain, positions = domain + (offsets << _STREAM_BITS), positions - offsets
    if draw_index is not None:
        version = version + ((draw_index & (MOST_DRAWS - 1)) << _STREAM_BITS)
    counter = (positions & _WORD, (positions >> 32) & _WORD, domain, version)
    words = philox_4x32_10(counter, (seeds & _WORD, (seeds >> 32) & _WORD))
    return NoiseKeys(_as_int32(words[0] | 1), *(_as_int32(word) for word in words[1:]))


def uniform(keys: NoiseKeys) -> Tensor:
    """One uniform number per row, strictly inside (0, 1): float64 ``[R]``, an odd multiple of ``2**-33``."""
    word = keys.second.to(torch.int64) & _WORD
    return (2 * word + 1).to(torch.float64) * 2.0**-33


def token_bits(keys: NoiseKeys, ids: Tensor) -> Tensor:
    """32 random bits for each token id of a row: int32."""
    h = ids * keys.first + keys.second
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * MIX_1 + keys.third
    h = h ^ ((h >> 15) & 0x1FFFF)
    h = h * MIX_2 + keys.fourth
    return h ^ ((h >> 16) & 0xFFFF)


def exponential(bits: Tensor) -> Tensor:
    """Standard exponential variables in base-2 units, float32: ``-log2(1 - u)``, u in (0, 1) from 32 random bits."""
    # The half with u < 1/2 holds the winners of a race and is derived from u itself, an odd multiple of 2**-32; the
    # other half is derived from 1 - u. The relative error is below 7.2e-6 everywhere and below 2e-7 towards u = 0.
    # Finite and positive for all bits: in [3.3e-10, 32].
    # The two halves need no select. A clamp gives all of the first half the exponent 31, which makes whole 0 and scaled
    # negative, -y * 2**-31. In the second half scaled is the mantissa m in [1, 2). The smaller of scaled and scaled -
    # 2.0 *as integers* is then s in [-1, 0), -2 * u or m - 2: of two negative floats the one nearer to 0, of a positive
    # and a negative float the negative one.
    y = (bits | 1).to(torch.float32).view(torch.int32)
    exponent = (y.clamp(max=BITS_OF_MINUS_2_31) >> 23) + (MAGIC_BITS + 2 * SIGN_BIT - BIAS)
    scaled = y - (exponent << 23)  # as a float, with the sign flipped: -y * 2**-31, or the mantissa of 1 - u
    s = torch.minimum(scaled, (scaled.view(torch.float32) - 2.0).view(torch.int32)).view(torch.float32)
    whole = (MAGIC + SIGN_BIT + 31.0) - exponent.view(torch.float32)
    return whole + s * polynomial(s, HALF_LOG)


def negative_log2(x: Tensor) -> Tensor:
    """``-log2(x)`` of positive normal float32 numbers: float32, absolute error below 1.2e-4, exact at powers of two."""
    exponent, fraction = exponent_and_fraction(x)
    return (MAGIC - exponent) - fraction * polynomial(fraction, LOG)


def gumbel(keys: NoiseKeys, ids: Tensor) -> Tensor:
    """Gumbel noise ``G = -log2(E)`` for each token id: float32, finite, in [-5, 31.5]."""
    # The polynomials' errors oscillate and cancel in the law: computed by quadrature, the probability that a token wins
    # is off by less than 1e-7, for two tokens and for one token against a sea of many, at any ratio of weights.
    return negative_log2(exponential(token_bits(keys, ids)))


def gumbel_bound(keys: NoiseKeys, ids: Tensor, share: Tensor) -> Tensor:
    """An upper bound of ``gumbel(keys, ids)``, float32, in a fifth of its instructions; ``share`` as ``bound_of``."""
    return bound_of(token_bits(keys, ids), share)


def bound_of(bits: Tensor, share: Tensor | float = 1.0) -> Tensor:
    """An upper bound of ``negative_log2(exponential(bits))``, float32; a test tries each of the ``2**32`` words."""
    # ``E >= u / ln(2)``, and exponent and mantissa of a float, read as one number, are at most 0.0861 below its base-2
    # logarithm. For small u, as winners of races have it, the bound is at most 0.09 above G; at u = 1/2 it is 0.5
    # above.
    # share is 1, or 0 for a row without noise: one number per row, so the product costs nothing per token.
    word = bits.view(torch.uint32).to(torch.float32).view(torch.int32)
    return BOUND * share - word.to(torch.float32) * (STEP * share)


def _as_int32(word: Tensor) -> Tensor:
    return ((word ^ 0x80000000) - 0x80000000).to(torch.int32)
