"""Copies of several tensors in as few launches as possible: the host takes longer to launch one than it takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = torch.int32  # torch's multi-tensor copy takes one dtype, so tensors of several are copied as such words
_DTYPES = frozenset((torch.float32, torch.float64, torch.int32, torch.int64))  # of whole words, which that copy takes
_MOST_BYTES = 1 << 20  # of a tensor that is copied with others; the driver's own copy is faster for larger ones


def copy_tensors(targets: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> None:
    """Copy each source into the target of the same index, with one launch for all small ones of 4- and 8-byte numbers.

    Numbers that the copy converts take one launch more for each pair of dtypes.

    Args:
        targets: tensors on one device.
        sources: the same shapes and device; any strides. A source of another dtype than its target is converted. Those
            that are not contiguous, of other dtypes, or large are copied one by one. Where the source or the target is
            None, nothing is copied.
    """
    into: list[Tensor] = []
    values: list[Tensor] = []
    converted: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target is None or source is None:
            continue
        dtypes = target.dtype, source.dtype
        if not _DTYPES.issuperset(dtypes) or source.nbytes > _MOST_BYTES or not _are_dense(target, source):
            target.copy_(source, non_blocking=True)
            continue
        pair = (into, values) if dtypes[0] is dtypes[1] else converted.setdefault(dtypes, ([], []))
        pair[0].append(target)
        pair[1].append(source)
    for pair in converted.values():
        torch._foreach_copy_(*pair, non_blocking=True)
    if len(into) == 1:
        into[0].copy_(values[0], non_blocking=True)
    elif into:
        if any(each.dtype is not values[0].dtype for each in values):
            into, values = [each.view(_WORD) for each in into], [each.view(_WORD) for each in values]
        torch._foreach_copy_(into, values, non_blocking=True)


def _are_dense(*tensors: Tensor) -> bool:
    """Whether tensors can be viewed as words: contiguous, also by the stride of a last dimension of size 1."""
    return all(each.is_contiguous() and each.dim() > 0 and each.stride(-1) == 1 for each in tensors)
