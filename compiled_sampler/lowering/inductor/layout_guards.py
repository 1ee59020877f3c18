"""Whether tensors are laid out as others were: by Dynamo's guards, which look at all of them in one call.

``engine.calls`` alone asks. It stands here because only this folder may name Dynamo.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from compiled_sampler.lowering.inductor.versions import was_checked


def alike(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: whether each has shape, strides, dtype, device and negative bit of its like."""
    # And whether it requires a gradient or was made in inference mode as its like, which says where torch lets it be
    # written. It holds no tensor. A guard also rejects tensor subclasses and repeated tensors.
    is_each_once = len({*map(id, tensors)}) == len(tensors)
    return _guard(tensors) if is_each_once and was_checked() else _comparison(tensors)


def _guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """``alike`` in a seventh of the time that a look at each property takes: 0.4 us for four tensors."""
    from torch._C._dynamo import guards

    make_guard: Any = guards.TensorGuards  # whose stub has one list of sizes for all tensors
    sizes, strides = [[*each.shape] for each in tensors], [[*each.stride()] for each in tensors]
    made: Callable[..., bool] = make_guard(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return made


def _comparison(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """``alike`` by public functions."""
    wanted = _layouts(tensors)
    return lambda *given: _layouts(given) == wanted


def _layouts(tensors: Sequence[Tensor]) -> list[Hashable]:
    return [
        (each.shape, each.stride(), each.dtype, each.device, each.is_neg(), each.requires_grad, each.is_inference())
        for each in tensors
    ]
