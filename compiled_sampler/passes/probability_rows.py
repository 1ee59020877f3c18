"""Rows of probabilities, and a seed for each row, as FlashInfer's functions need them beside a draw.

Stages of the library, though the signatures stand in ``integrations``: what is kept on disk of a stage is known by the
sources of the rooms that stages are made of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.arithmetic import in_float64, log2_of_tensor, reciprocal
from compiled_sampler.core.filters import keep_prefix, last_kept
from compiled_sampler.core.mass import MASS_BITS
from compiled_sampler.core.noise import philox_4x32_10
from compiled_sampler.core.order import indices, order_key, pack, row_logits
from compiled_sampler.passes.kept import probability_mass

_WORD, _TOP_BIT = 0xFFFFFFFF, 0x80000000
_SEEDS_OF_ROWS = 0x73656564  # a word of the counter that no noise uses


def base_2_logits(probs: Tensor) -> Tensor:
    """The base-2 logarithm of each probability, float32 ``[R, V]``; -inf for 0 and less, NaN for NaN."""
    bits = probs.view(torch.int32)
    is_finite = (bits > 0) & (probs < float("inf"))
    # Monotone, so the order stays; of probabilities that differ by less than 1e-6 of themselves, some become equal.
    t = log2_of_tensor(torch.where(is_finite, in_float64(probs), 1.0)).to(torch.float32)
    return torch.where(is_finite, t, torch.where((bits > 0) | probs.isnan(), probs, float("-inf")))


def keep_first(values: Tensor, top_k: Tensor) -> Tensor:
    """True for the first k tokens of each row's order: bool ``[R, V]``."""
    packed, ordered, _ = _ordered(values)
    count = torch.where(top_k == 0, values.shape[1], top_k)
    last = ordered.gather(1, (count.clamp(1, values.shape[1]) - 1)[:, None])
    return (packed >= last) & (count > 0)[:, None]


def keep_nucleus(probs: Tensor, top_p: Tensor) -> Tensor:
    """True for the shortest prefix of each row's order that has the share ``top_p`` of its sum: bool ``[R, V]``."""
    packed, ordered, ids = _ordered(probs)
    mass = probability_mass(probs.to(torch.float32)).gather(1, ids)
    top_k = torch.full(top_p.shape, probs.shape[1], dtype=torch.int64, device=probs.device)
    last = last_kept(ordered, keep_prefix(ordered, mass, top_k, top_p, mass.sum(-1)))
    return (packed >= last[:, None]) & ((top_p > 0.0) & (top_p <= 1.0))[:, None]


def renormalised(probs: Tensor, keep: Tensor) -> Tensor:
    """Probabilities of what is kept, divided by their sum, which is one of integers: float32 ``[R, V]``; else 0."""
    units = torch.where(keep, probability_mass(probs.to(torch.float32)), 0).sum(-1)
    share = reciprocal(units.to(torch.float64)) * 2.0**MASS_BITS
    return torch.where(keep, probs.to(torch.float64) * share[:, None], 0.0).to(torch.float32)


def _ordered(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The packed key of each token, int64 ``[R, V]``; these in the row's order, and the tokens in it."""
    vocab_size = values.shape[1]
    packed = pack(order_key(row_logits(values, vocab_size)), indices(vocab_size, values.device))
    return packed, *packed.sort(-1, descending=True)


def seeds_of_rows(seeds: Tensor, rows: Tensor) -> Tensor:
    """A seed for each row, int64 ``[R]``: 64 bits of Philox4x32-10, the seed its key and the row, >= 0, its counter."""
    seeds = seeds + torch.zeros_like(rows)
    counter = (rows & _WORD, (rows >> 32) & _WORD, torch.zeros_like(rows), torch.full_like(rows, _SEEDS_OF_ROWS))
    low, high, *_ = philox_4x32_10(counter, (seeds & _WORD, (seeds >> 32) & _WORD))
    low, high = low & _WORD, high & _WORD
    return ((high ^ _TOP_BIT) - _TOP_BIT) * 2**32 + low
