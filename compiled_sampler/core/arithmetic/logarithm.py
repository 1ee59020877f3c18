"""The base-2 logarithm in float64, in exactly rounded steps, so that it has the same bits on every path.

``x = 2**e * m`` with m in [sqrt(1/2), sqrt(2)), and ``log2(m) = 2 / ln(2) * atanh(s)`` with ``s = (m - 1) / (m + 1)``,
so ``|s| <= 0.172``. Ten terms of the series of atanh are exact to ``2**-55`` of it. Near 1 the exponent is 0 and the
series has the relative precision of s, so that the logprob of an almost certain token keeps its digits.

``parameter_log2`` splits numbers alike, but its sum carries the rounding errors along, because a parameter's logarithm
must be right to the last bit of float32; logprobs need less, and take fewer steps for each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.arithmetic.mass import reciprocal
from compiled_sampler.core.arithmetic.parameter_log2 import LOG2_E, exponent_and_mantissa
from compiled_sampler.core.arithmetic.polynomial import polynomial

LN2 = 0.6931471805599453
"""``ln(2)`` as a float64."""

_ATANH = tuple(2.0 * LOG2_E / (2 * term + 1) for term in range(10))


def log2(x: Tensor) -> Tensor:
    """``log2(x)`` of positive normal float64 numbers, relative error below ``2**-50``; exact for powers of two.

    Args:
        x: float64, any shape; finite. For 0 the result is some finite number.

    Returns:
        float64, the shape of ``x``.
    """
    exponent, m = exponent_and_mantissa(x.view(torch.int64))
    s = (m - 1.0) * reciprocal(m + 1.0)
    return exponent.to(torch.float64) + s * polynomial(s * s, _ATANH)
