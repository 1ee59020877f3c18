"""The guard of Inductor's private parts: versions of torch on which they were checked."""

from __future__ import annotations

import functools
import re
import warnings

import torch

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
