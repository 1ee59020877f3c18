"""Logits that look like those of language models, and two extremes, for benchmarks and tests."""

from __future__ import annotations

import torch
from torch import Tensor

DISTRIBUTIONS = ("peaked", "normal", "flat", "ties")


def logits_like(
    distribution: str, rows: int, vocab_size: int, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> Tensor:
    """Logits ``[rows, vocab_size]``.

    Args:
        distribution: "peaked": Zipf-shaped log-probabilities with exponent 2 in shuffled order plus N(0, 0.5) noise;
            "normal": N(0, 2); "flat": N(0, 0.01); "ties": peaked, rounded to bfloat16.
        rows: R.
        vocab_size: V.
        device: where.
        dtype: float32, bfloat16 or float16.
        seed: of torch's generator on that device.

    Raises:
        ValueError: an unknown distribution.
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution must be one of {DISTRIBUTIONS}, got {distribution!r}")
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.randn(rows, vocab_size, device=device, generator=generator)
    if distribution == "normal":
        return (noise * 2.0).to(dtype)
    if distribution == "flat":
        return (noise * 0.01).to(dtype)
    ranks = torch.rand(rows, vocab_size, device=device, generator=generator).argsort(-1) + 1
    logits = noise * 0.5 - 2.0 * ranks.log()
    return logits.bfloat16().to(dtype) if distribution == "ties" else logits.to(dtype)
