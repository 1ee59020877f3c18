"""Polynomials in exactly rounded steps: a product, then a sum, never contracted to one rounding."""

from __future__ import annotations

import torch
from torch import Tensor


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
