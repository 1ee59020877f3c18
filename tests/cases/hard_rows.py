"""The hard rows of the conformance suite by mode and slot, and near ties that are made from the noise itself."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler import SamplingParams
from compiled_sampler.conformance import rows as suite
from compiled_sampler.core.noise import TARGET, NoiseKeys, gumbel, noise_keys
from compiled_sampler.modes import Mode, uncovered

KINDS = tuple(made for _, made in suite.KINDS)
"""Rows ``[R, V]`` made of a standard normal sample."""


class Batch(NamedTuple):
    """Rows to draw, on the CPU."""

    logits: Tensor
    """``[R, V]``."""
    slots: Tensor
    """int64 ``[R]``."""
    positions: Tensor
    """int64 ``[R]``."""


def mixed_requests(vocab_size: int, count: int, seed: int) -> list[SamplingParams]:
    """Requests that need each mode in turn; equal arguments give equal requests."""
    source = random.Random(seed)
    families = suite.families(vocab_size)
    seeds = (*suite.SEEDS, *(source.getrandbits(64) for _ in range(count - len(suite.SEEDS))))
    picked = ({name: source.choice(values) for name, values in families[i % 5].items()} for i in range(count))
    return [SamplingParams(seed=seed, **options) for seed, options in zip(seeds, picked, strict=False)]


def mixed_batch(requests: list[SamplingParams], mode: Mode, rows: int, dtype: torch.dtype, seed: int) -> Batch:
    """Rows of every kind for requests that the mode covers, by slot; equal arguments give equal rows."""
    generator = torch.Generator().manual_seed(seed)
    covered = torch.tensor([slot for slot, each in enumerate(requests) if uncovered(mode, each) is None])
    slots = covered[torch.randint(len(covered), (rows,), generator=generator)]
    positions = torch.randint(2**63 - 1, (rows,), generator=generator)
    special = torch.tensor(suite.POSITIONS)
    positions[: len(special)] = special[:rows]
    logits = hard_rows([requests[slot] for slot in slots], positions, mode.vocab_size, generator)
    return Batch(logits.to(dtype), slots, positions)


def hard_rows(requests: list[SamplingParams], positions: Tensor, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Rows of every kind in a random order, each for its request and position: float32 ``[R, V]``."""
    rows = len(requests)
    noise = torch.randn(rows, vocab_size, generator=generator)
    logits = torch.cat([kind(part) for kind, part in zip(KINDS, noise.tensor_split(len(KINDS)), strict=True)])
    logits = logits[torch.randperm(rows, generator=generator)]
    near = torch.rand(rows, generator=generator) < 1.0 / len(KINDS)
    logits[near] = near_ties([requests[row] for row in near.nonzero()[:, 0].tolist()], positions[near], vocab_size)
    return logits


def near_ties(requests: list[SamplingParams], positions: Tensor, vocab_size: int) -> Tensor:
    """Float32 logits ``[R, V]`` that bring all scores of a row's race within a few ulps of 40: ``x = (40 - G) / c``."""
    seeds = torch.tensor([((each.seed or 0) + 2**63) % 2**64 - 2**63 for each in requests], dtype=torch.int64)
    keys = NoiseKeys(*(key[:, None] for key in noise_keys(seeds, positions, TARGET)))
    scale = torch.tensor([math.log2(math.e) / (each.temperature or 1.0) for each in requests])
    return (40.0 - gumbel(keys, torch.arange(vocab_size, dtype=torch.int32))) / scale[:, None]
