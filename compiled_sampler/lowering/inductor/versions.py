"""The guard of torch's private parts: versions on which they were checked; and whether tensors are laid out as others.

The latter is by Dynamo's guards, which look at all tensors in one call. ``engine.calls`` alone asks; it stands here
because only this folder may name Dynamo.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

KNOWN_TORCH = (2, 11), (2, 15)
"""The first and the last minor version with which the tests of ``lowering`` passed."""


class UnknownTorchWarning(UserWarning):
    """This torch is none of ``KNOWN_TORCH``: the same tokens, more time."""


def is_known() -> bool:
    """Whether private parts of this torch may be used; if not, one warning says what that costs."""
    if was_checked():
        return True
    _warn(str(torch.__version__))
    return False


def was_checked() -> bool:
    """Whether this torch is one of ``KNOWN_TORCH``; nothing warns."""
    return KNOWN_TORCH[0] <= _minor(str(torch.__version__)) <= KNOWN_TORCH[1]


@functools.cache
def _warn(version: str) -> None:
    first, last = (".".join(map(str, each)) for each in KNOWN_TORCH)
    warnings.warn(
        f"compiled_sampler does not know torch {version}: it was checked on {first} to {last}. Tokens stay the same, "
        "but kernels are as Inductor makes them if left alone, are compiled one after the other and are not kept on "
        "disk, so steps and warmup() take longer; warmup() compares every compiled stage with eager torch. For speed "
        f"install torch {last}, or a compiled_sampler that knows this one",
        UnknownTorchWarning,
        stacklevel=2,
    )


def _minor(version: str) -> tuple[int, ...]:
    """The major and the minor number: "2.15.0a0+git" is (2, 15)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


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
