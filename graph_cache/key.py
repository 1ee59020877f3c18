"""What tells one captured variant from another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graph_cache.buffers import BufferSpec


@dataclass(frozen=True)
class Binding:
    """The identity of a caller's tensor that variants read in place.

    Attributes:
        input_name: the input it stands for.
        data_ptr: address of element 0.
        shape: ``(rows, *tail)``.
        strides: in elements.
        dtype: element type.
    """

    input_name: str
    data_ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, input_name: str, tensor: Tensor) -> Binding:
        """The identity of ``tensor`` (``[rows, *tail]``, any strides) as ``input_name``."""
        return cls(input_name, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def matches(self, tensor: Tensor) -> bool:
        """True when ``tensor`` starts at the same element and steps alike: its rows are rows of this binding."""
        return tensor.data_ptr() == self.data_ptr and tensor.stride() == self.strides


@dataclass(frozen=True)
class VariantKey:
    """One captured graph.

    Attributes:
        name: the registered callable.
        rows: its bucket B.
        binding: the caller's tensors it reads in place; None when every input is an owned buffer.
    """

    name: str
    rows: int
    binding: tuple[Binding, ...] | None = None

    def __str__(self) -> str:
        """``greedy[4]``, or ``greedy[4] bound to logits``."""
        label = f"{self.name}[{self.rows}]"
        if self.binding is None:
            return label
        return f"{label} bound to {', '.join(each.input_name for each in self.binding)}"


def usable_bindings(
    inputs: Mapping[str, BufferSpec], bindings: Mapping[str, Binding], bucket: int
) -> tuple[Binding, ...] | None:
    """The bindings of ``inputs`` that have rows for ``bucket``; None when there is none."""
    bound = ((name, spec) for name, spec in inputs.items() if name in bindings)
    names = [name for name, spec in bound if bindings[name].shape[0] >= bucket * spec.times]
    return tuple(bindings[name] for name in names) or None
