"""Polynomials in exactly rounded steps: a product, then a sum, never contracted to one rounding."""

from __future__ import annotations

import torch
from torch import Tensor

MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000
"""The float32 ``1.5 * 2**23`` and its bits: a number added to it is rounded to an integer, which its low bits hold."""


def polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """The polynomial with these coefficients at ``x``, by Horner's rule.

    Args:
        x: float32, any shape.
        coefficients: float32 numbers, the constant first.

    Returns:
        float32, the shape of ``x``.
    """
    result = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result = result * x + coefficient
    return result
