"""Tensors at addresses that were seen before: for graphs that read and write a caller's memory in place."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from graph_cache.batches.routing import Binding

_ALIGNED = 256  # bytes; kernels may be specialised for the alignment of an address, by less than this


def tensor_at(place: Binding, device: torch.device) -> Tensor:
    """The tensor at an address, with no hold on its memory; the memory need not be in use.

    What is captured from it may be replayed only while a caller holds a tensor there.
    """
    if device.type == "cpu":
        memory = (ctypes.c_char * _span(place)).from_address(place.data_ptr)
        return torch.frombuffer(memory, dtype=place.dtype).as_strided(place.shape, place.strides)
    with torch.cuda.device(device):
        found: Tensor = torch.as_tensor(_Exported(place), device=device)
    return found.view(place.dtype)


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
