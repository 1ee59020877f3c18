"""Polynomials in exactly rounded steps: each product and each sum is rounded, and the two are never fused to an FMA."""

from __future__ import annotations

import torch
from torch import Tensor

MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000
"""The float32 ``1.5 * 2**23`` and its bits: adding it rounds a number to an integer, which the low bits then hold."""


def polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """The value of a polynomial at ``x`` by Horner's rule: float32, the shape of ``x``.

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
