"""Copies of several tensors in as few launches as possible: the host takes longer to launch one than it takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = torch.int32  # torch's multi-tensor copy takes one dtype, so contiguous tensors are copied as such words
_MOST_BYTES = 1 << 20  # of a tensor that is copied with others; the driver's own copy is faster for larger ones


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into the target of the same index, with one launch for all small contiguous pairs.

    Args:
        targets: tensors on one device.
        sources: the same shapes, dtypes and device; any strides.
    """
    into: list[Tensor] = []
    values: list[Tensor] = []
    for target, source in zip(targets, sources, strict=True):
        dtype = source.dtype
        is_small = source.nbytes <= _MOST_BYTES and dtype.itemsize in (4, 8) and source.dim() > 0
        if is_small and source.is_contiguous() and target.is_contiguous():
            into.append(target)
            values.append(source)
        else:
            target.copy_(source, non_blocking=True)
    if len(into) == 1:
        into[0].copy_(values[0], non_blocking=True)
    elif into:
        if any(each.dtype is not values[0].dtype for each in values):
            into, values = [each.view(_WORD) for each in into], [each.view(_WORD) for each in values]
        torch._foreach_copy_(into, values, non_blocking=True)
