"""Probability mass in fixed point: ``2**t`` as an int64 with 40 fractional bits, so that sums are exact in any order.

The weight of a token is an integer, therefore a prefix sum, a row total and a comparison with ``top_p`` cannot depend
on how a kernel tiles the row. Total variation distance between the weights and the real softmax, for finite logits:

- the polynomial is off by at most 1e-7 of a weight, its float32 evaluation by 3e-7;
- rounding ``(x - max) * c`` moves ``t`` by at most ``2**-23 * |t|``, a weight by ``|t| * 2**t * 8.3e-8`` of the
  maximum's weight;
- truncating a weight to 40 bits loses less than ``2**-40`` of the maximum's weight: ``V * 2**-40 <= 1.4e-7`` for V =
  151,936.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.arithmetic import MAGIC, MAGIC_BITS, polynomial

MASS_BITS = 40  # fractional bits of a weight; the weight of the likeliest token is ``2**40``

FLOAT_MAX = 3.4028234663852886e38

EXP2 = (1.0, 0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
_LOWEST = -64.0  # the weight of any smaller t is zero; clamping to it keeps the exponent arithmetic in range


def scaled_logits(x: Tensor, row_max: Tensor, scale: Tensor) -> Tensor:
    """Base-2 logits relative to the row's maximum, ``t = (x - max) * c``: float32, the shape of ``x``."""
    # the largest float for an infinite maximum: a ``+inf`` token gets ``+inf``, and no NaN arises
    return (x - row_max.clamp(-FLOAT_MAX, FLOAT_MAX)) * scale


def clamped(t: Tensor) -> Tensor:
    """Scaled logits in [-64, 0], the range of weights: float32, the shape of ``t``; -64 for NaN."""
    t = torch.where(t > _LOWEST, t, _LOWEST)
    return torch.where(t < 0.0, t, 0.0)


def exp2_mass(t: Tensor) -> Tensor:
    """Weights ``2**t`` as int64 in units of ``2**-40``, truncated towards zero: in ``[0, 2**40]``."""
    return exp2_scaled(t).to(torch.int64)


def exp2_moment(t: Tensor) -> Tensor:
    """``-2**t * t`` as int64 in units of ``2**-40``, truncated towards zero: what the entropy of a law sums."""
    # The product is rounded to float32 once. No sum of it over ``MAX_VOCAB_SIZE`` tokens reaches ``2**62``.
    return (exp2_scaled(t) * -clamped(t)).to(torch.int64)


def exp2_square(t: Tensor) -> Tensor:
    """The square of a weight, ``2**(2 * t)``, as int64 in units of ``2**-40``, truncated towards zero."""
    # It is that of the truncated weight, rounded to float32 once, so it is at most the weight. No sum of it over
    # ``MAX_VOCAB_SIZE`` tokens reaches ``2**62``; the sum is off by ``2**-24`` of itself and ``2**-40`` a token.
    weight = exp2_units(t)
    return (weight * (weight * 2.0**-MASS_BITS)).to(torch.int64)


def exp2_units(t: Tensor) -> Tensor:
    """``exp2_mass`` as float32, which represents each weight exactly: fewer instructions where no sum follows."""
    return exp2_scaled(t).trunc()


def exp2_scaled(t: Tensor) -> Tensor:
    """``2**t`` in units of ``2**-40`` before truncation: float32 in ``[2**-24, 2**40]``."""
    return (_exp2_bits(t) + (MASS_BITS << 23)).view(torch.float32)


def _exp2_bits(t: Tensor) -> Tensor:
    """Int32 bits of ``2**t`` as float32, within ``[2**-64, 1]``."""
    # Splits t into an integer and a fraction in [-0.5, 0.5] by adding a magic number (exact and fast), evaluates a
    # polynomial of degree 5 on the fraction, and adds the integer to the exponent of the result.
    t = clamped(t)
    shifted = t + MAGIC
    fraction = t - (shifted - MAGIC)
    return polynomial(fraction, EXP2).view(torch.int32) + ((shifted.view(torch.int32) - MAGIC_BITS) << 23)
