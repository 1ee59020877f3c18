"""What distinguishes the tensors of one call of a stage from those of another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from compiled_sampler import edit_tables
from compiled_sampler.batch import DraftTable, SlotTable

TABLES = (SlotTable, DraftTable, *edit_tables.TABLES)
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


def fixed(value: Any) -> Iterator[Any]:
    """What code is made for of each tensor in the tables inside nested tuples: its shape, and what else can vary."""
    if isinstance(value, SlotTable):
        yield from (tuple(each.shape) for each in value)
    elif isinstance(value, DraftTable):
        yield from ((tuple(each.shape), each.dtype) for each in value)
    elif isinstance(value, edit_tables.TABLES):
        yield from ((tuple(each.shape), each.stride()) for each in value)
    elif isinstance(value, tuple):
        for item in value:
            yield from fixed(item)
