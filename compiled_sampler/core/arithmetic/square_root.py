"""The square root in float64, in exactly rounded steps, so that it has the same bits on every path."""

from __future__ import annotations

import torch
from torch import Tensor

_INVERSE_ROOT_BITS = 0x5FE6EB50C7B537A9  # minus half the bits of x this gives the bits of 1 / sqrt(x) within 4 per cent
_NEWTON_STEPS = 5


def square_root(x: Tensor) -> Tensor:
    """``sqrt(x)`` of normal float64 numbers by Newton's method for its inverse, within ``2**-50`` of it; 0 for 0.

    Roots, like divisions, differ between compilers.

    Args:
        x: float64, any shape; 0 or normal, and not negative.

    Returns:
        float64, the shape of ``x``.
    """
    y = (_INVERSE_ROOT_BITS - (x.view(torch.int64) >> 1)).view(torch.float64)
    for _ in range(_NEWTON_STEPS):
        y = y * (1.5 - (0.5 * x) * y * y)
    return torch.where(x > 0.0, x * y, 0.0)
