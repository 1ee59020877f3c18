"""What adapters of other samplers share: parameters as tensors, the state of a generator, versions of packages."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Params, as_int64


def column(params: Sequence[Params], name: str, device: torch.device) -> Tensor:
    """A parameter of each row, float32 ``[R]``."""
    return torch.tensor([getattr(each, name) for each in params], dtype=torch.float32, device=device)


def top_ks(params: Sequence[Params], vocab_size: int, device: torch.device) -> Tensor:
    """``top_k`` of each row, int32 ``[R]``; as engines have it, V keeps every token."""
    ks = [each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params]
    return torch.tensor(ks, dtype=torch.int32, device=device)


def seed_generator(generator: torch.Generator, seed: int | None, position: int) -> None:
    """Put a generator in the state that stands for a seed and a position; without a seed in one that nobody knows."""
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(as_int64(hash((seed, position))))


def installed(*names: str) -> dict[str, str]:
    """The version of the first of the distributions that is installed, by its name; nothing if none is."""
    for name in names:
        try:
            return {name: importlib.metadata.version(name)}
        except importlib.metadata.PackageNotFoundError:
            continue
    return {}
