"""Functions that steer which kernels Inductor makes and leave every value as it is; each such trick has a name here."""

from __future__ import annotations

import torch
from torch import Tensor


def kept_in_kernel(anchor: Tensor, values: Tensor | float, otherwise: Tensor | float) -> Tensor:
    """``torch.where(anchor, values, otherwise)``, which makes Inductor compute ``values`` in the kernel of ``anchor``.

    Inductor makes a separate kernel of a constant, or of a reduction whose inputs no other computation reads. Behind a
    condition the value belongs to the kernel that computes or reads ``anchor``. Rows in which the condition selects
    ``otherwise`` do not exist, or no stage reads their result.
    """
    return torch.where(anchor, values, otherwise)
