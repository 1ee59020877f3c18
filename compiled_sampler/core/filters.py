"""Top-k, top-p and min-p on tokens that stand in the order: every filter keeps a prefix.

Prefix masses are integer sums, so "mass before < top_p * base" has one answer on every machine. The product is formed
in float64, where one rounding moves the boundary by less than ``2**-53`` of the base.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.mass import exp2_mass, scaled_logits
from compiled_sampler.core.order import key_float, packed_key
from compiled_sampler.core.rows import Rows

KEEP_ALL = -(2**63)
"""The threshold that every packed key reaches."""

_NO_CUT = 2**63 - 1
_NOTHING = 2**63 - 1


def ordered_logits(ordered: Tensor, scale: Tensor) -> Tensor:
    """Scaled logits ``t`` of tokens that stand in the order: int64 packed ``[R, C]`` to float32 ``[R, C]``."""
    keys = packed_key(ordered)
    largest = keys.amax(-1, keepdim=True)  # the first; looked up, it would keep a sort out of the kernel that uses it
    return scaled_logits(key_float(keys), key_float(largest), scale[:, None])


def largest_of(ordered: Tensor) -> Tensor:
    """The largest logit of each row, float32 ``[R]``, from its packed keys ``[R, C]`` in descending order."""
    return key_float(packed_key(ordered[:, 0]))


def keep_top_k(ordered: Tensor, top_k: Tensor) -> Tensor:
    """True for the first ``top_k`` tokens: bool ``[R, C]``."""
    return torch.arange(ordered.shape[1], device=ordered.device) < top_k[:, None]


def keep_top_p(mass: Tensor, top_p: Tensor, base: Tensor) -> Tensor:
    """True while the mass before a token is below ``top_p * base``; always for the first token.

    Args:
        mass: int64 ``[R, C]``, weights in the order.
        top_p: float64 ``[R]``, in (0, 1]; 1 keeps every token.
        base: int64 ``[R]``, the mass that ``top_p`` is a share of.

    Returns:
        bool ``[R, C]``.
    """
    return (mass.cumsum(-1) - mass) < mass_cut(top_p, base)[:, None]


def keep_min_p(t: Tensor, min_p_log2: Tensor) -> Tensor:
    """True where a token is at least ``min_p`` times as likely as the likeliest.

    Args:
        t: float32 ``[R, C]``, base-2 scaled logits, maximum 0.
        min_p_log2: float32 ``[R]``; -inf keeps every token.

    Returns:
        bool ``[R, C]``.
    """
    return t >= min_p_log2[:, None]


def mass_cut(top_p: Tensor, base: Tensor) -> Tensor:
    """The smallest integer that is not below ``top_p * base``: int64 ``[R]``, out of reach where ``top_p`` is 1."""
    cut = (top_p * base.to(torch.float64)).ceil()
    return torch.where(top_p < 1.0, cut.to(torch.int64), _NO_CUT)


def top_k_mass(ordered: Tensor, t: Tensor, top_k: Tensor) -> Tensor:
    """Weights of the first ``top_k`` tokens of the order, 0 for the others: int64 ``[R, C]``.

    Args:
        ordered: int64 ``[R, C]``, packed keys in descending order.
        t: float32 ``[R, C]``, their scaled logits.
        top_k: int64 ``[R]``.
    """
    return torch.where(keep_top_k(ordered, top_k), exp2_mass(t), 0)


def keep_prefix(ordered: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor, base: Tensor) -> Tensor:
    """True for the tokens that top-k and top-p keep; always for the first token.

    Args:
        ordered: int64 ``[R, C]``, packed keys of the first C tokens in descending order.
        mass: int64 ``[R, C]``, their weights.
        top_k: int64 ``[R]``.
        top_p: float64 ``[R]``.
        base: int64 ``[R]``, the mass that ``top_p`` is a share of.

    Returns:
        bool ``[R, C]``, a prefix of each row.
    """
    first = torch.arange(ordered.shape[1], device=ordered.device) == 0
    return (keep_top_k(ordered, top_k) & keep_top_p(mass, top_p, base)) | first


def last_kept(ordered: Tensor, keep: Tensor) -> Tensor:
    """The last packed key that is kept: int64 ``[R]`` from ``[R, C]`` in descending order, one of which is."""
    return torch.where(keep, ordered, _NOTHING).amin(-1)


def keep_candidates(ordered: Tensor, rows: Rows, row_mass: Tensor | None) -> Tensor:
    """True for the candidates that pass all three filters, for rows with ``top_k <= C``.

    Args:
        ordered: int64 ``[R, C]``, packed keys of the first C tokens in descending order.
        rows: per-row parameters ``[R]``.
        row_mass: int64 ``[R]``, the base of top-p; None takes the mass after top-k.

    Returns:
        bool ``[R, C]``, a prefix of each row, never empty.
    """
    t = ordered_logits(ordered, rows.scale)
    mass = top_k_mass(ordered, t, rows.top_k)
    base = mass.sum(-1) if row_mass is None else row_mass
    first = torch.arange(ordered.shape[1], device=ordered.device) == 0
    return keep_prefix(ordered, mass, rows.top_k, rows.top_p, base) & (keep_min_p(t, rows.min_p_log2) | first)
