"""Where a caller's tensors lie in memory, and tensors at such addresses for graphs that work there in place."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graph_cache.registry import Given

_ALIGNED = 256  # bytes; kernels may be specialised for the alignment of an address, by less than this


@dataclass(frozen=True)
class Binding:
    """The identity of a caller's tensor that variants read in place.

    Attributes:
        input_name: the input that the tensor is bound to.
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
        """The identity of ``tensor`` (``[rows, *tail]``, any strides), bound to ``input_name``."""
        return cls(input_name, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def matches(self, tensor: Given) -> bool:
        """Whether ``tensor`` has this address, dtype and strides, so that its rows are rows of the bound tensor."""
        if not isinstance(tensor, Tensor) or tensor.data_ptr() != self.data_ptr:
            return False
        return tensor.dtype is self.dtype and tensor.stride() == self.strides


def tensor_at(place: Binding, device: torch.device) -> Tensor:
    """The tensor at an address, with no hold on its memory; the memory need not be in use.

    What is captured from it may be replayed only while a caller holds a tensor there.
    """
    if device.type == "cpu":
        memory = (ctypes.c_char * _span(place)).from_address(place.data_ptr)
        return torch.frombuffer(memory, dtype=place.dtype).as_strided(place.shape, place.strides)
    with torch.cuda.device(device):
        words: Tensor = torch.as_tensor(_Exported(place), device=device)
    return words.view(place.dtype)


def stand_in(place: Binding, device: torch.device, fill: float) -> Tensor:
    """A new tensor of the same shape, strides and alignment, for a call whose memory must not be the caller's."""
    size = place.dtype.itemsize
    memory = torch.full(((_span(place) + _ALIGNED) // size,), fill, dtype=place.dtype, device=device)
    return memory.as_strided(place.shape, place.strides, (place.data_ptr - memory.data_ptr()) % _ALIGNED // size)


class _Exported:
    """Memory in the form of numba's CUDA array interface, which torch reads without a copy.

    It is exported as integers of the same size: the interface does not know bfloat16.
    """

    def __init__(self, place: Binding) -> None:
        size = place.dtype.itemsize
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": place.shape,
            "strides": tuple(stride * size for stride in place.strides),
            "typestr": "|u1" if size == 1 else f"<i{size}",
            "data": (place.data_ptr, False),
            "version": 2,
        }


def _span(place: Binding) -> int:
    """Bytes from the first to the last element; 0 if there is none."""
    if not math.prod(place.shape):
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(place.shape, place.strides, strict=True))
    return (steps + 1) * place.dtype.itemsize
