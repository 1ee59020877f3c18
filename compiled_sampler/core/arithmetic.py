"""Exactly rounded arithmetic: polynomials, reciprocals, roots and logarithms that have the same bits on every path.

Each product and each sum is rounded on its own; none is fused to an FMA. Divisions and roots differ between compilers,
so here they are Newton's method in such steps.

``log2`` of libm, of numpy and of CUDA are three functions, which differ in the last bit. Here are our own. Two are of
float64. With ``x = 2**e * m``, m in [sqrt(1/2), sqrt(2)), and ``s = (m - 1) / (m + 1)``, so ``|s| <= 0.172``::

    log2(x) = e + 2 / ln(2) * (s + s**3 / 3 + s**5 / 5 + ...)

- ``log2`` serves logprobs. Ten terms are exact to ``2**-55`` of the series. Near 1 the exponent is 0, so the logprob of
  an almost certain token keeps its digits.
- ``log2_of_number`` and ``log2_of_tensor`` serve parameters: one formula for the host and the device. It carries the
  rounding errors along, and computes the first term in two parts, of which the larger has so few bits that its products
  are exact. It is off by less than 0.56 ulp of float64. Rounded to float32, as the slot table stores it, it is that of
  glibc for every float32 number in (0, 1], and for each of 2e9 random float64 numbers that were compared.

``log2_float32`` serves races over residuals. Of a float32 number ``2**e * (1 + f)``, f in [0, 1), it is e plus a
polynomial of f.
"""

from __future__ import annotations

import math
import struct
from typing import TypeVar

import torch
from torch import Tensor

MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000
"""The float32 ``1.5 * 2**23`` and its bits: adding it rounds a number to an integer, which the low bits then hold."""

BIAS = 127  # of the exponent of a float32


def polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """The value of a polynomial at ``x`` by Horner's rule, of coefficients from the constant up: the dtype of ``x``."""
    result = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result = result * x + coefficient
    return result


_RECIPROCAL_BITS = 0x7FDE6238DA3C2118  # minus the bits of x this gives the bits of 1 / x within 12 per cent
_NEWTON_STEPS = 5


def reciprocal(x: Tensor) -> Tensor:
    """``1 / x`` of positive float64 numbers by Newton's method, within ``2**-51``; 0 for 0."""
    y = (_RECIPROCAL_BITS - x.view(torch.int64)).view(torch.float64)
    for _ in range(_NEWTON_STEPS):
        y = y * (2.0 - x * y)
    return torch.where(x > 0.0, y, 0.0)


_INVERSE_ROOT_BITS = 0x5FE6EB50C7B537A9  # minus half the bits of x this gives the bits of 1 / sqrt(x) within 4 per cent


def square_root(x: Tensor) -> Tensor:
    """``sqrt(x)`` of positive normal float64 numbers by Newton's method for its inverse, within ``2**-50``; 0 for 0."""
    y = (_INVERSE_ROOT_BITS - (x.view(torch.int64) >> 1)).view(torch.float64)
    for _ in range(_NEWTON_STEPS):
        y = y * (1.5 - (0.5 * x) * y * y)
    return torch.where(x > 0.0, x * y, 0.0)


_FRACTION_BITS, _FRACTION, _EXPONENT = 23, 0x7FFFFF, 0xFF  # of a float32


def in_float64(x: Tensor) -> Tensor:
    """The float64 that each float32 number means, ``[R]``; denormals too, which a thread may flush in a conversion."""
    bits = x.view(torch.int32)
    size = (bits & _FRACTION).to(torch.float64) * 2.0**-149
    denormal = torch.where(bits < 0, -size, size)
    return torch.where(((bits >> _FRACTION_BITS) & _EXPONENT) == 0, denormal, x.to(torch.float64))


LOG2_E = math.log2(math.e)  # ``log2(e)``, rounded to float64; divided by a temperature it is the scale of a row

Number = TypeVar("Number", float, Tensor)

_SQRT_HALF = 0x3FE6A09E667F3BCD  # bits of sqrt(1/2), rounded up
_LEAST_NORMAL, _DENORMAL_EXPONENT = 1 << 52, -1074
_KEEP_26, _KEEP_24 = -(1 << 27), -(1 << 29)  # masks that keep the first bits of a float64's mantissa
_C = 2.0 / math.log(2.0)  # 0x1.71547652b82fep+1; a test compares all three with their digits
_C_HIGH, _C_LOW = float.fromhex("0x1.715476p+1"), float.fromhex("0x1.4ae0bf85ddf44p-25")
_ODD = tuple(1.0 / (2 * term + 1) for term in range(1, 13))


def log2_of_number(x: float) -> float:
    """``log2`` of a positive, finite Python number."""
    bits = bits_of(x)
    denormal = bits < _LEAST_NORMAL
    bits = bits_of(float(bits)) if denormal else bits  # no operation sees a denormal, which a thread may flush
    steps = (bits - _SQRT_HALF) >> 52
    m = _float(bits - (steps << 52))
    quotient = (m - 1.0) / (m + 1.0)
    exponent = float(steps + (_DENORMAL_EXPONENT if denormal else 0))
    return _sum(exponent, m, _float(bits_of(m) & _KEEP_26), quotient, _float(bits_of(quotient) & _KEEP_24))


def log2_of_tensor(x: Tensor) -> Tensor:
    """``log2`` of each number, float64, positive and finite: compilers assume that no difference of bits overflows."""
    bits = x.view(torch.int64)
    denormal = bits < _LEAST_NORMAL
    bits = torch.where(denormal, bits.to(torch.float64).view(torch.int64), bits)
    steps, m = exponent_and_mantissa(bits)
    quotient = (m - 1.0) / (m + 1.0)
    exponent = (steps + torch.where(denormal, _DENORMAL_EXPONENT, 0)).to(torch.float64)
    return _sum(exponent, m, _masked(m, _KEEP_26), quotient, _masked(quotient, _KEEP_24))


def exponent_and_mantissa(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Of positive normal float64 numbers ``2**e * m``, given by their bits: e, int64, and m in [sqrt(1/2), sqrt(2))."""
    exponent = (bits - _SQRT_HALF) >> 52
    return exponent, (bits - (exponent << 52)).view(torch.float64)


def _sum(exponent: Number, m: Number, m_high: Number, quotient: Number, s: Number) -> Number:
    """The logarithm from the parts of a number."""
    # m is the mantissa, in [sqrt(1/2), sqrt(2)), and m_high its first 26 bits; quotient is (m - 1) / (m + 1), rounded,
    # and s its first 24 bits.
    s_low = ((m - 1.0) - s * (m_high + 1.0) - s * (m - m_high)) / (m + 1.0)
    square = s * s + s_low * (s + s + s_low)
    series = square * 0.0 + _ODD[-1]
    for coefficient in _ODD[-2::-1]:
        series = series * square + coefficient
    head, tail = s * _C_HIGH, s * _C_LOW + s_low * _C + (quotient * _C) * (square * series)
    whole = exponent + head
    return whole + ((head - (whole - exponent)) + tail)


def _masked(x: Tensor, mask: int) -> Tensor:
    return (x.view(torch.int64) & mask).view(torch.float64)


def bits_of(x: float) -> int:
    """The bits of a float64 as an int64."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def exponent_and_fraction(x: Tensor) -> tuple[Tensor, Tensor]:
    """``MAGIC + e`` and f, float32 each, of positive normal float32 numbers ``2**e * (1 + f)`` with f in [0, 1)."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + (MAGIC_BITS - BIAS)
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    return exponent.view(torch.float32), mantissa - 1.0


# _LOG_OF_FLOAT32: log2(1 + f) / f on [0, 1], exact at 1; absolute error of the log in float32 1.8e-7
_LOG_OF_FLOAT32 = (
    1.4426898956298828,
    -0.7211657762527466,
    0.4786836802959442,
    -0.34730103611946106,
    0.2418646514415741,
    -0.1375211924314499,
    0.05205890163779259,
    -0.009309137240052223,
)


def log2_float32(x: Tensor) -> Tensor:
    """``log2(x)`` of positive normal float32 numbers: float32, absolute error below 2e-7 besides its rounding."""
    exponent, fraction = exponent_and_fraction(x)
    return (exponent - MAGIC) + fraction * polynomial(fraction, _LOG_OF_FLOAT32)


LN2 = 0.6931471805599453  # ``ln(2)`` as a float64

_ATANH = tuple(2.0 * LOG2_E / (2 * term + 1) for term in range(10))


def log2(x: Tensor) -> Tensor:
    """``log2(x)`` of positive normal float64 numbers, relative error below ``2**-50``; exact for powers of two."""
    # For 0 the result is some finite number.
    exponent, m = exponent_and_mantissa(x.view(torch.int64))
    s = (m - 1.0) * reciprocal(m + 1.0)
    return exponent.to(torch.float64) + s * polynomial(s * s, _ATANH)
