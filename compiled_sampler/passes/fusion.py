"""What steers Inductor's choice of kernels and computes nothing: each such trick has a name here."""

from __future__ import annotations

import torch
from torch import Tensor


def kept_in_kernel(anchor: Tensor, values: Tensor | float, otherwise: Tensor | float) -> Tensor:
    """``torch.where(anchor, values, otherwise)`` whose condition says in which kernel the result is made.

    Inductor makes a kernel of its own of a constant, or of a reduction whose inputs others do not read. Behind a
    condition it belongs to the kernel that computes or reads ``anchor``. The rows where the condition chooses
    ``otherwise`` do not exist, or nobody reads their result.
    """
    return torch.where(anchor, values, otherwise)
