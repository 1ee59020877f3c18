"""Whether two results of a stage are the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_NAN_BITS = 0x7F80_0001  # the smallest NaN, as an integer


def fault(compiled: Callable[[], Any], wanted: Any) -> str:
    """How compiled code fails, or how its results differ from those wanted; empty where they are equal."""
    try:
        return difference(compiled(), wanted)
    except Exception as error:  # whatever a compiler that is not known, or its code, may raise
        return f"it fails with {type(error).__name__}: {error}".split("\n")[0]


def difference(found: Any, wanted: Any) -> str:
    """How nested tuples of tensors differ; empty where they are equal, bit for bit, but for the payloads of NaNs.

    Stages hand on the bits of the largest magnitude of a row as an int32, so that NaNs count as equal there too.
    """
    pairs = tree_leaves(found), tree_leaves(wanted)
    if len(pairs[0]) != len(pairs[1]):
        return f"{len(pairs[0])} results instead of {len(pairs[1])}"
    for number, (left, right) in enumerate(zip(*pairs, strict=True)):
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            if left is not right:
                return f"result {number} is {type(left).__name__} instead of {type(right).__name__}"
        elif (left.dtype, left.shape) != (right.dtype, right.shape):
            return f"result {number} is {left.dtype} {[*left.shape]} instead of {right.dtype} {[*right.shape]}"
        elif not torch.equal(_bits(left), _bits(right)):
            wrong = int((_bits(left) != _bits(right)).sum())
            return f"result {number} differs in {wrong} of {right.numel()} numbers"
    return ""


def _bits(values: Tensor) -> Tensor:
    """The bits of floats as integers, every NaN the same."""
    if values.dtype == torch.int32:
        return values.clamp(max=_NAN_BITS)
    if not values.is_floating_point():
        return values
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.where(values.isnan(), torch.nan, values).contiguous().view(integers[values.itemsize])
