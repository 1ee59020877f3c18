"""Top-k, top-p and min-p masks for tokens that are sorted in the order; each filter keeps a prefix of the order.

Prefix masses are integer sums, so "mass before < top_p * base" has one answer on every machine. The product is formed
in float64, where one rounding moves the boundary by less than ``2**-53`` of the base.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.mass import exp2_mass, scaled_logits
from compiled_sampler.core.order import key_float, packed_key
from compiled_sampler.core.rows import RowParams

KEEP_ALL = -(2**63)  # a threshold that every packed key reaches, so that every token is kept: the smallest int64

_NO_CUT = 2**63 - 1
DROPPED = 2**63 - 1  # in place of a packed key, which is smaller


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
    return torch.where(keep, ordered, DROPPED).amin(-1)


def keep_candidates(ordered: Tensor, rows: RowParams, row_mass: Tensor | None) -> Tensor:
    """Mask of the candidates that pass top-k, top-p and min-p, for rows with ``top_k <= C``: bool ``[R, C]``."""
    # row_mass is the base of top-p; None takes the mass after top-k.
    t = ordered_logits(ordered, rows.scale)
    mass = top_k_mass(ordered, t, rows.top_k)
    base = mass.sum(-1) if row_mass is None else row_mass
    first = torch.arange(ordered.shape[1], device=ordered.device) == 0
    return keep_prefix(ordered, mass, rows.top_k, rows.top_p, base) & (keep_min_p(t, rows.min_p_log2) | first)
