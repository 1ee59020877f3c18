"""Rows of probabilities or logits by themselves: as logits, their first k tokens, their nucleus, renormalised."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.arithmetic.mass import MASS_BITS, reciprocal
from compiled_sampler.core.arithmetic.parameter_log2 import log2_of_tensor
from compiled_sampler.core.filters import keep_prefix, last_kept
from compiled_sampler.core.noise import philox_4x32_10
from compiled_sampler.core.order import indices, order_key, pack, row_logits
from compiled_sampler.core.row_table import in_float64

_WORD, _TOP_BIT = 0xFFFFFFFF, 0x80000000
_SEEDS_OF_ROWS = 0x73656564  # a word of the counter that no noise uses


def base_2_logits(probs: Tensor) -> Tensor:
    """The base-2 logarithm of each probability, float32 ``[R, V]``; -inf for 0 and less, NaN for NaN.

    The logarithm is monotone, so the order stays. Of probabilities that differ by less than 1e-6 of themselves, some
    become equal.

    Args:
        probs: float32 ``[R, V]``, of any sum.
    """
    bits = probs.view(torch.int32)
    is_finite = (bits > 0) & (probs < float("inf"))
    t = log2_of_tensor(torch.where(is_finite, in_float64(probs), 1.0)).to(torch.float32)
    return torch.where(is_finite, t, torch.where((bits > 0) | probs.isnan(), probs, float("-inf")))


def keep_first(values: Tensor, top_k: Tensor) -> Tensor:
    """True for the first k tokens of each row's order: bool ``[R, V]``.

    Args:
        values: float32, bfloat16 or float16 ``[R, V]``, logits or probabilities.
        top_k: int64 ``[R]``; 0 keeps every token, and what is less keeps none.
    """
    packed, ordered, _ = _ordered(values)
    count = torch.where(top_k == 0, values.shape[1], top_k)
    last = ordered.gather(1, (count.clamp(1, values.shape[1]) - 1)[:, None])
    return (packed >= last) & (count > 0)[:, None]


def keep_nucleus(probs: Tensor, top_p: Tensor) -> Tensor:
    """True for the shortest prefix of each row's order that has the share ``top_p`` of its sum: bool ``[R, V]``.

    Args:
        probs: float32 ``[R, V]``, of any sum.
        top_p: float64 ``[R]``, in (0, 1]; any other keeps none.
    """
    packed, ordered, ids = _ordered(probs)
    mass = weights(probs).gather(1, ids)
    top_k = torch.full(top_p.shape, probs.shape[1], dtype=torch.int64, device=probs.device)
    last = last_kept(ordered, keep_prefix(ordered, mass, top_k, top_p, mass.sum(-1)))
    return (packed >= last[:, None]) & ((top_p > 0.0) & (top_p <= 1.0))[:, None]


def renormalised(probs: Tensor, keep: Tensor) -> Tensor:
    """Probabilities of what is kept, divided by their sum, which is one of integers: float32 ``[R, V]``; else 0.

    Args:
        probs: float32, bfloat16 or float16 ``[R, V]``.
        keep: bool ``[R, V]``.
    """
    units = torch.where(keep, weights(probs), 0).sum(-1)
    share = reciprocal(units.to(torch.float64)) * 2.0**MASS_BITS
    return torch.where(keep, probs.to(torch.float64) * share[:, None], 0.0).to(torch.float32)


def weights(probs: Tensor) -> Tensor:
    """Probabilities in units of ``2**-40``, int64 ``[R, V]``; NaN and less than 0 count as 0, more than 1 as 1."""
    p = probs.to(torch.float64)
    return (torch.where(p > 0.0, p, 0.0).clamp(max=1.0) * 2.0**MASS_BITS).to(torch.int64)


def seeds_of_rows(seeds: Tensor, rows: Tensor) -> Tensor:
    """A seed for each row, int64 ``[R]``: 64 bits of Philox4x32-10 with the seed as its key and the row as its counter.

    Args:
        seeds: int64 ``[R]`` or ``[1]``.
        rows: int64 ``[R]``, >= 0.
    """
    seeds = seeds + torch.zeros_like(rows)
    counter = (rows & _WORD, (rows >> 32) & _WORD, torch.zeros_like(rows), torch.full_like(rows, _SEEDS_OF_ROWS))
    low, high, *_ = philox_4x32_10(counter, (seeds & _WORD, (seeds >> 32) & _WORD))
    low, high = low & _WORD, high & _WORD
    return ((high ^ _TOP_BIT) - _TOP_BIT) * 2**32 + low


def _ordered(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The packed key of each token, int64 ``[R, V]``; these in the row's order, and the tokens in it."""
    vocab_size = values.shape[1]
    packed = pack(order_key(row_logits(values, vocab_size)), indices(vocab_size, values.device))
    return packed, *packed.sort(-1, descending=True)
