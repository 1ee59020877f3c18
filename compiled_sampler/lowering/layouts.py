"""The layouts of the tensors of a stage: what distinguishes its calls, tensors without numbers, and equal copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler.batch import DraftTable, SlotTable
from compiled_sampler.edits.tables import TABLES as EDIT_TABLES

_FAR = 2**31  # elements from which Inductor must index with 64 bits

TABLES: tuple[type[Any], ...] = (SlotTable, DraftTable, *EDIT_TABLES)
"""What has one size for every batch, so that its rows are no batch's rows. ``RowEntries`` have a batch's."""


def shape(leaf: Tensor | None) -> Any:
    """Everything about a tensor but its numbers; None where one is left out."""
    return leaf if leaf is None else (leaf.shape, leaf.dtype, leaf.stride())


def layout(leaf: Tensor | None) -> Any:
    """What a compiled stage is made for: everything about a tensor but how many rows there are, if several."""
    return leaf if leaf is None else (leaf.shape[0] == 1, leaf.dtype, tuple(leaf.shape[1:]), leaf.stride())


def leaves(value: Any) -> Iterator[Tensor | None]:
    """The tensors inside nested tuples, in order; None where one is left out. Tables of one sampler are all alike."""
    if value is None or isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple) and not isinstance(value, TABLES):
        for item in value:
            yield from leaves(item)


def is_far(tensor: Tensor) -> bool:
    """Whether Inductor must index a tensor with 64 bits."""
    return tensor.shape[0] * tensor.stride(0) >= _FAR


def table_layouts(value: Any) -> Iterator[Any]:
    """What a compiled stage is made for of each tensor in the tables inside nested tuples: not how many slots."""
    if isinstance(value, TABLES):
        yield from ((layout(column), is_far(column)) for column in value)
    elif isinstance(value, tuple):
        for item in value:
            yield from table_layouts(item)


@dataclass(frozen=True)
class TensorSpec:
    """Everything about a tensor but its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements before it in its storage, which say how it is aligned
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of a tensor."""
        place = int(tensor.storage_offset()) % 16
        return cls(tuple(tensor.shape), tensor.stride(), place, tensor.dtype, tensor.device)

    def made(self) -> Tensor:
        """A tensor like this in shape, with no memory behind it: it must not be read."""
        tensor = self.empty()
        tensor.untyped_storage().resize_(0)
        return tensor

    def empty(self) -> Tensor:
        """A tensor like this in shape, whose numbers are whatever the memory held."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        length = self.offset if 0 in self.shape else self.offset + last + 1
        memory = torch.empty(length, dtype=self.dtype, device=self.device)
        return memory.as_strided(self.shape, self.stride, self.offset)


def unshared(tensors: tuple[Any, ...], *, are_read: bool) -> tuple[Any, ...]:
    """The arguments of a stage that writes, with other memory in place of such that is given a second time."""
    # Torch looks for such memory where a stage is compiled, and would compile it for memory that is given once. The
    # other one lies as the first does: where it is better aligned, each call would copy what is not. Unless the stage
    # runs on them, there is no memory behind the others, a history's say.

    def other(tensor: Tensor, _: Tensor) -> Tensor:
        return _copy(tensor) if are_read else TensorSpec.of(tensor).made()

    return _mapped(tensors, lambda tensor: tensor, other)


def copies(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments that lie as the originals do, which a stage is compiled for; memory that is given twice is one here."""
    return _mapped(tensors, _copy, _in_memory_of)


def _mapped(
    tensors: tuple[Any, ...], first: Callable[[Tensor], Tensor], again: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Any, ...]:
    """The arguments with ``first`` of each tensor, and ``again`` of one at an address that came before, and of that."""
    made = dict[int, Tensor]()

    def one(tensor: Tensor) -> Tensor:
        if not tensor.untyped_storage().nbytes():
            return tensor
        before = made.get(tensor.data_ptr())
        if before is not None:
            return again(tensor, before)
        return made.setdefault(tensor.data_ptr(), first(tensor))

    found: tuple[Any, ...] = tree_map_only(Tensor, one, tensors)
    return found


def _copy(tensor: Tensor) -> Tensor:
    """A copy in memory of its own, which lies as the tensor does."""
    return TensorSpec.of(tensor).empty().copy_(tensor)


def _in_memory_of(tensor: Tensor, other: Tensor) -> Tensor:
    """A tensor like one, in the memory of another from its first number on."""
    made, place = torch.empty(0, dtype=tensor.dtype, device=tensor.device), other.storage_offset()
    return made.set_(other.untyped_storage(), place, tensor.shape, tensor.stride())
