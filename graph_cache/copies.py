"""Copies of several tensors in as few launches as possible: the host takes longer to launch one than it takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = torch.int32  # torch's multi-tensor copy takes one dtype, so tensors of several are copied as such words
_DTYPES = frozenset((torch.float32, torch.float64, torch.int32, torch.int64))  # of whole words, which that copy takes
_MOST_BYTES = 1 << 20  # of a tensor that is copied with others; the driver's own copy is faster for larger ones


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into the target of the same index, with one launch for all small ones of 4- and 8-byte numbers.

    Args:
        targets: tensors on one device.
        sources: the same shapes, dtypes and device; any strides. Those that are not contiguous, of other dtypes, or
            large are copied one by one.
    """
    into: list[Tensor] = []
    values: list[Tensor] = []
    for target, source in zip(targets, sources, strict=True):
        if source.dtype in _DTYPES and source.nbytes <= _MOST_BYTES and _is_dense(source) and _is_dense(target):
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


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor can be viewed as words: contiguous, also by the stride of a last dimension of size 1."""
    return tensor.is_contiguous() and tensor.dim() > 0 and tensor.stride(-1) == 1
