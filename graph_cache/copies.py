"""Copies of several tensors in as few launches as possible: the host takes longer to launch one than it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    is_mixed = False
    for target, source in zip(targets, sources, strict=True):
        if target is None or source is None:
            continue
        dtypes = target.dtype, source.dtype
        is_small = _DTYPES.issuperset(dtypes) and source.nbytes <= _MOST_BYTES
        is_dense = is_small and target.is_contiguous() and source.is_contiguous() and target.dim() > 0
        if not (is_dense and target.stride(-1) == source.stride(-1) == 1):  # of size 1 the stride may be any
            target.copy_(source, non_blocking=True)
        elif dtypes[0] is dtypes[1]:
            is_mixed = is_mixed or (bool(into) and dtypes[0] is not into[0].dtype)
            into.append(target)
            values.append(source)
        else:
            pair = converted.setdefault(dtypes, ([], []))
            pair[0].append(target)
            pair[1].append(source)
    for pair in converted.values():
        torch._foreach_copy_(*pair, non_blocking=True)
    if len(into) == 1:
        into[0].copy_(values[0], non_blocking=True)
    elif into:
        if is_mixed:
            into, values = _words_of(into), _words_of(values)
        torch._foreach_copy_(into, values, non_blocking=True)


class NewCopies:
    """Copies of the same tensors into new ones, as often as it is called; how they are copied is found out once."""

    # Against ``copy_tensors`` into new tensors it saves 5 us of the host for two results and 10 for six (CPU tensors).
    # Sources lie on one device; those that copy_tensors would copy together take one launch.

    def __init__(self, sources: tuple[Tensor | None, ...]) -> None:
        self.sources = sources
        present = [i for i, source in enumerate(sources) if source is not None]
        small = [i for i in present if _is_small(sources[i])]
        self._small = small if len(small) > 1 else []
        self._single = [i for i in present if i not in self._small]
        self._values: list[Any] = [sources[i] for i in self._small]
        self._is_mixed = len({value.dtype for value in self._values}) > 1
        if self._is_mixed:
            self._values = _words_of(self._values)

    def __call__(self) -> list[Any]:
        """New tensors with what the sources hold now, on the current stream; None for None."""
        copies: list[Any] = [None if source is None else torch.empty_like(source) for source in self.sources]
        if self._small:
            into = [copies[i] for i in self._small]
            torch._foreach_copy_(_words_of(into) if self._is_mixed else into, self._values, non_blocking=True)
        for i in self._single:
            copies[i].copy_(self.sources[i], non_blocking=True)
        return copies


def _is_small(tensor: Any) -> bool:
    """Whether a tensor is copied with others, if the target is like it."""
    is_dense = tensor.is_contiguous() and tensor.dim() > 0 and tensor.stride(-1) == 1
    return tensor.dtype in _DTYPES and tensor.nbytes <= _MOST_BYTES and is_dense


def _words_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor if tensor.dtype is _WORD else tensor.view(_WORD) for tensor in tensors]
