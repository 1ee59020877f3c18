"""Inputs of the golden cases: rows of every kind, from integer hashes and exactly representable floats alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_DENORMAL = 2.0**-149


def hashed(count: int, seed: int) -> Tensor:
    """Words in ``[0, 2**32)``, int64 ``[count]``: the 32-bit permutation ``lowbias32`` of 0, 1, ... and a seed."""
    h = (torch.arange(count) * 0x9E3779B1 + seed * 0x85EBCA6B) & _WORD
    for shift, factor in ((16, 0x7FEB352D), (15, 0x2C1B3C6D)):
        h = ((h ^ (h >> shift)) * factor) & _WORD
    return h ^ (h >> 16)


def bells(rows: int, columns: int, seed: int) -> Tensor:
    """Nearly normal numbers of deviation 1.15, multiples of 1/128: float32 ``[rows, columns]``."""
    words = hashed(rows * columns, seed).view(rows, columns)
    total = (words & 255) + ((words >> 8) & 255) + ((words >> 16) & 255) + (words >> 24)
    return (total - 510).to(torch.float32) * 2.0**-7


def hard_logits(rows: int, vocab_size: int, seed: int) -> Tensor:
    """Rows ``[R, V]`` of 16 kinds in turn: plain, peaked, flat, tied, masked, strange and empty ones."""
    x, words = bells(rows, vocab_size, seed), hashed(rows * vocab_size, seed + 1).view(rows, vocab_size)
    some, few, sign = words % 3 == 0, words % 50 == 0, torch.where(words & 64 > 0, 1.0, -1.0)
    kinds = (
        2.0 * x,
        8.0 * x,
        x * 2.0**-7,
        (2.0 * x).round(),
        4.0 * x,
        torch.where(some, -math.inf, 2.0 * x),
        torch.where(few, math.nan, 4.0 * x),
        torch.where(few, math.inf, x),
        0.0 * sign,
        (words & 0xFFF).to(torch.float32) * _DENORMAL * sign,
        torch.where(some, 1.5, 1.5 + 2.0**-23),
        x * 2.0**120,
        torch.full_like(x, -math.inf),
        torch.where(some, math.nan, -math.inf),
        torch.where(few, -3.0 * 2.0**100, -math.inf),
        torch.where(some, 2.0 * x, 4.0 * x - 8.0),
    )
    kind = torch.arange(rows) % len(kinds)
    return torch.stack(kinds)[kind, torch.arange(rows)]


def weighted(rows: int, vocab_size: int, seed: int, favourites: Tensor) -> Tensor:
    """Probabilities up to a factor: float32 ``[rows, V]`` in ``[0, 1]``, peaked at ``favourites``, int64 ``[rows]``."""
    words = hashed(rows * vocab_size, seed).view(rows, vocab_size)
    # A third of the tokens has none, and every seventh row has none at all.
    p = torch.where(words % 3 == 0, 0, words >> 16).to(torch.float32) * (2.0**-17 / vocab_size)
    p[torch.arange(rows), favourites] = (1.0 + (words[:, 0] & 3).to(torch.float32)) * 2.0**-3
    p[6::7] = 0.0
    return p


def first_tokens(logits: Tensor) -> Tensor:
    """The first token of each row's order, int64 ``[R]``; 0 where every token is masked."""
    x = torch.where(logits > -math.inf, logits, -math.inf).to(torch.float64)
    ids = torch.arange(x.shape[1])
    return torch.where(x == x.amax(-1, keepdim=True), ids, x.shape[1]).amin(-1) % x.shape[1]


def drafted_tokens(counts: tuple[int, ...], firsts: Tensor, vocab_size: int, seed: int) -> Tensor:
    """Drafts ``[N, K]``: likely ones at most places, some of any token, one out of range; -1 beyond the counts."""
    words = hashed(len(counts) * max(counts), seed).tolist()
    drafts, row = torch.full((len(counts), max(counts)), -1), 0
    for n, count in enumerate(counts):
        for j in range(count):
            word = words[n * max(counts) + j]
            drafts[n, j] = int(firsts[row + j]) if word % 4 else word // 4 % vocab_size
        row += count + 1
    drafts[-1, 0] = vocab_size
    return drafts
