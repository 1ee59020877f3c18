"""Top-k, top-p and min-p masks for tokens that are sorted in the order; each filter keeps a prefix of the order.

Prefix masses are integer sums, so "mass before < top_p * base" has one answer on every machine. The product is formed
in float64, where one rounding moves the boundary by less than ``2**-53`` of the base.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.arithmetic import log2_of_tensor, reciprocal
from compiled_sampler.core.mass import MASS_BITS, exp2_mass, scaled_logits
from compiled_sampler.core.noise import philox_4x32_10
from compiled_sampler.core.order import indices, key_float, order_key, pack, packed_key, row_logits
from compiled_sampler.core.row_table import in_float64
from compiled_sampler.core.rows import RowParams

KEEP_ALL = -(2**63)
"""A threshold that every packed key reaches, so that every token is kept: the smallest int64."""

_NO_CUT = 2**63 - 1
_NOTHING = 2**63 - 1


def ordered_logits(ordered: Tensor, scale: Tensor) -> Tensor:
    """Base-2 scaled logits, float32 ``[R, C]``, of packed keys ``ordered``, int64 ``[R, C]`` in descending order."""
    keys = packed_key(ordered)
    largest = keys.amax(-1, keepdim=True)  # the first key; indexing it would keep a sort from fusing into this kernel
    return scaled_logits(key_float(keys), key_float(largest), scale[:, None])


def largest_of(ordered: Tensor) -> Tensor:
    """The largest logit of each row, float32 ``[R]``, from its packed keys ``[R, C]`` in descending order."""
    return key_float(packed_key(ordered[:, 0]))


def keep_top_k(ordered: Tensor, top_k: Tensor) -> Tensor:
    """Mask of the first ``top_k`` tokens of the order: bool ``[R, C]``."""
    return torch.arange(ordered.shape[1], device=ordered.device) < top_k[:, None]


def keep_top_p(mass: Tensor, top_p: Tensor, base: Tensor) -> Tensor:
    """Mask of the tokens before which the mass is below ``top_p * base``; always true for the first token."""
    return (mass.cumsum(-1) - mass) < mass_cut(top_p, base)[:, None]


def keep_min_p(t: Tensor, min_p_log2: Tensor) -> Tensor:
    """Mask of the tokens that are at least ``min_p`` times as likely as the likeliest: bool ``[R, C]``."""
    return t >= min_p_log2[:, None]


def mass_cut(top_p: Tensor, base: Tensor) -> Tensor:
    """The smallest integer not below ``top_p * base``: int64 ``[R]``; where ``top_p`` is 1, more than any mass."""
    cut = (top_p * base.to(torch.float64)).ceil()
    return torch.where(top_p < 1.0, cut.to(torch.int64), _NO_CUT)


def top_k_mass(ordered: Tensor, t: Tensor, top_k: Tensor) -> Tensor:
    """Weights of the first ``top_k`` tokens of the order, 0 for the others: int64 ``[R, C]``."""
    return torch.where(keep_top_k(ordered, top_k), exp2_mass(t), 0)


def keep_prefix(ordered: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor, base: Tensor) -> Tensor:
    """Mask of the tokens that both top-k and top-p keep: bool ``[R, C]``; the first token is always kept."""
    first = torch.arange(ordered.shape[1], device=ordered.device) == 0
    return (keep_top_k(ordered, top_k) & keep_top_p(mass, top_p, base)) | first


def last_kept(ordered: Tensor, keep: Tensor) -> Tensor:
    """The packed key of the last token kept, int64 ``[R]``; each row of ``keep`` has at least one true."""
    return torch.where(keep, ordered, _NOTHING).amin(-1)


def keep_candidates(ordered: Tensor, rows: RowParams, row_mass: Tensor | None) -> Tensor:
    """Mask of the candidates that pass top-k, top-p and min-p, for rows with ``top_k <= C``: bool ``[R, C]``."""
    # row_mass is the base of top-p; None takes the mass after top-k.
    t = ordered_logits(ordered, rows.scale)
    mass = top_k_mass(ordered, t, rows.top_k)
    base = mass.sum(-1) if row_mass is None else row_mass
    first = torch.arange(ordered.shape[1], device=ordered.device) == 0
    return keep_prefix(ordered, mass, rows.top_k, rows.top_p, base) & (keep_min_p(t, rows.min_p_log2) | first)


_WORD, _TOP_BIT = 0xFFFFFFFF, 0x80000000
_SEEDS_OF_ROWS = 0x73656564  # a word of the counter that no noise uses


def base_2_logits(probs: Tensor) -> Tensor:
    """The base-2 logarithm of each probability, float32 ``[R, V]``; -inf for 0 and less, NaN for NaN.

    The logarithm is monotone, so the order stays. Of probabilities that differ by less than 1e-6 of themselves, some
    become equal.
    """
    bits = probs.view(torch.int32)
    is_finite = (bits > 0) & (probs < float("inf"))
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
    mass = weights(probs).gather(1, ids)
    top_k = torch.full(top_p.shape, probs.shape[1], dtype=torch.int64, device=probs.device)
    last = last_kept(ordered, keep_prefix(ordered, mass, top_k, top_p, mass.sum(-1)))
    return (packed >= last[:, None]) & ((top_p > 0.0) & (top_p <= 1.0))[:, None]


def renormalised(probs: Tensor, keep: Tensor) -> Tensor:
    """Probabilities of what is kept, divided by their sum, which is one of integers: float32 ``[R, V]``; else 0."""
    units = torch.where(keep, weights(probs), 0).sum(-1)
    share = reciprocal(units.to(torch.float64)) * 2.0**MASS_BITS
    return torch.where(keep, probs.to(torch.float64) * share[:, None], 0.0).to(torch.float32)


def weights(probs: Tensor) -> Tensor:
    """Probabilities in units of ``2**-40``, int64 ``[R, V]``; NaN and less than 0 count as 0, more than 1 as 1."""
    p = probs.to(torch.float64)
    return (torch.where(p > 0.0, p, 0.0).clamp(max=1.0) * 2.0**MASS_BITS).to(torch.int64)


def seeds_of_rows(seeds: Tensor, rows: Tensor) -> Tensor:
    """A seed for each row, int64 ``[R]``: 64 bits of Philox4x32-10, the seed its key and the row, >= 0, its counter."""
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
