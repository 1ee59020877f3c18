"""Filters that compare each token's probability with a bound of its row: p-less, and the exclusion of top choices.

Both see the law at the temperature of the request, in integer masses (``core/mass.py``), so that sums are exact in any
order and a comparison has one answer on every path. A row with a ``+inf`` passes as it is: the race is among such
tokens anyway. A NaN stays, so that the status of its row says so.

- p-less: Tan et al., "p-less sampling", arXiv 2509.23234: keep tokens with ``p >= sum(p**2)``, which the likeliest has.
- XTC, "exclude top choices": text-generation-webui's pull request 6335, as llama.cpp has it: with a given probability,
  drop all tokens with ``p >= threshold`` but the last of them in the order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.core.arithmetic import reciprocal
from compiled_sampler.core.mass import MASS_BITS, exp2_mass, exp2_moment, exp2_square, scaled_logits
from compiled_sampler.core.noise import XTC, noise_keys, uniform
from compiled_sampler.core.order import indices, is_visible, order_key, pack, row_logits
from compiled_sampler.core.rows import RowSlots, expand_to
from compiled_sampler.core.stage import holds
from compiled_sampler.edits.row_filters import PLess, Xtc
from compiled_sampler.passes.blocks import logit_blocks

_ABOVE_ALL = 2**63 - 1


class MassUnits(NamedTuple):
    """What a mass is relative to: float32 ``[R]`` each."""

    row_max: Tensor
    scale: Tensor
    """``log2(e) / temperature``."""


class MassSums(NamedTuple):
    """Sums over the tokens of each block of a row, int64 ``[R, B]`` each, in units of ``2**-40``."""

    total: Tensor
    squares: Tensor | None
    """Of squared masses; None where not asked for."""
    moment: Tensor | None
    """Of ``exp2_moment``; None where not asked for."""


@holds(tokens=True)
def mass_sums(
    logits: Tensor, units: MassUnits, *, vocab_size: int, block: int, squares: bool = False, moment: bool = False
) -> MassSums:
    """The sums of each block of a row ``[R, B]``."""
    x, _ = logit_blocks(logits, vocab_size, block)
    t, keep = scaled(x, units), is_visible(x)
    return MassSums(
        torch.where(keep, exp2_mass(t), 0).sum(-1),
        torch.where(keep, exp2_square(t), 0).sum(-1) if squares else None,
        torch.where(keep, exp2_moment(t), 0).sum(-1) if moment else None,
    )


def p_less_cut(sums: MassSums, row_max: Tensor, slots: Tensor, p_less: PLess) -> Tensor:
    """The least mass that a token may have, int64 ``[R]``: ``sum(p**2)`` in units of masses; 0 keeps every token."""
    assert sums.squares is not None
    total, squares = sums.total.sum(-1).to(torch.float64), sums.squares.sum(-1).to(torch.float64)
    cut = (squares * float(2**MASS_BITS) * reciprocal(total)).ceil().to(torch.int64).clamp(max=2**MASS_BITS)
    is_used = (p_less.is_on[slots.clamp(min=0)] != 0) & (slots >= 0) & (row_max < float("inf"))
    return torch.where(is_used, cut, 0)


@holds(tokens=True)
def without_light(logits: Tensor, units: MassUnits, cut: Tensor, *, vocab_size: int) -> Tensor:
    """The logits with -inf for tokens of less mass than ``cut``: float32 ``[R, V]`` in new memory."""
    x = row_logits(logits, vocab_size)
    is_dropped = is_visible(x) & (exp2_mass(scaled(x, units)) < cut[:, None])
    return torch.where(is_dropped, float("-inf"), x)


def top_choice_mass(sums: MassSums, row_max: Tensor, row_slots: RowSlots, xtc: Xtc) -> Tensor:
    """The least mass of a top choice, int64 ``[R]``; more than any mass where the row's coin leaves all in."""
    # The coin is keyed by seed and position, on a stream of its own, so a draft's is that of the row that judges it.
    slot = row_slots.slots.clamp(min=0)
    coin = uniform(noise_keys(row_slots.table.seeds[slot], row_slots.positions, XTC))
    acts = (coin < xtc.probability[slot]) & (row_slots.slots >= 0) & (row_max < float("inf"))
    cut = (xtc.threshold[slot] * sums.total.sum(-1).to(torch.float64)).ceil().to(torch.int64)
    return torch.where(acts, cut, _ABOVE_ALL)


@holds(tokens=True)
def last_top_choices(logits: Tensor, units: MassUnits, cut: Tensor, *, vocab_size: int, block: int) -> Tensor:
    """The last top choice of each block in the order, int64 ``[R, B]`` packed; above every token where is none."""
    x, ids = logit_blocks(logits, vocab_size, block)
    is_top = is_visible(x) & (exp2_mass(scaled(x, units)) >= expand_to(cut, x))
    return torch.where(is_top, pack(order_key(x), ids), _ABOVE_ALL).amin(-1)


@holds(tokens=True)
def without_first(logits: Tensor, last: Tensor, *, vocab_size: int) -> Tensor:
    """The logits with -inf for tokens before the last top choice of the row: float32 ``[R, V]`` in new memory."""
    x = row_logits(logits, vocab_size)
    packed = pack(order_key(x), indices(vocab_size, x.device))
    return torch.where(is_visible(x) & (packed > last.amin(-1)[:, None]), float("-inf"), x)


def scaled(x: Tensor, units: MassUnits) -> Tensor:
    """The scaled logits of tokens, float32 ``[R, ...]``, in the units of their row ``[R]``."""
    return scaled_logits(x, expand_to(units.row_max, x), expand_to(units.scale, x))
