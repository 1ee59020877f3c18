"""The law of all visible tokens of a row, for logprobs, by a pass that does not know the row's largest logit.

It is made in blocks, each relative to its own largest logit, and reads the row once instead of twice. Bringing the
blocks to the unit of the row rounds: so the blocks are the same on every path, whatever the batch and the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.core.arithmetic import LOG2_E
from compiled_sampler.core.mass import MASS_BITS, clamped, exp2_mass, exp2_moment, exp2_scaled, scaled_logits
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.order import key_float, order_key
from compiled_sampler.core.rows import RowSlots, gather_rows, with_scale
from compiled_sampler.core.stage import holds
from compiled_sampler.passes.blocks import AnyLogits, logit_blocks
from compiled_sampler.passes.kept import Cut, Kept
from compiled_sampler.passes.maxima import best_bits, largest_key, largest_logit, visible_bits

LAW_BLOCK = 512
"""Tokens of a block. Another number changes bits of logprobs."""

_UNIT = 2.0**-MASS_BITS


class BlockLaws(NamedTuple):
    """The visible tokens of each block, ``[R, B]``."""

    keys: Tensor
    """int32, the order key of the largest logit."""
    masses: Tensor
    """int64, the mass relative to that logit."""
    moments: Tensor | None
    """int64, the sum of ``-2**t * t`` relative to that logit; None where no entropy is asked for."""


def law_scale(row_slots: RowSlots, processed_scale: Tensor | None) -> Tensor:
    """``log2(e) / temperature`` of each row, float32 ``[R]``; for padding, whose results mean nothing, any."""
    # This is a stage of its own, as each block of a row would wait for the request's slot and for what stands there.
    # processed_scale: float32 [S], also of greedy requests; None takes the table's, where these have temperature 1.
    if processed_scale is not None:
        row_slots = with_scale(row_slots, processed_scale)
    rows = gather_rows(row_slots, stream=TARGET)  # the noise is not used
    return rows.scale if processed_scale is not None else torch.where(rows.noise_mask == 0, LOG2_E, rows.scale)


@holds(tokens=True)
def law_in_blocks(
    logits: AnyLogits, scale: Tensor | None, *, vocab_size: int, moment: bool, by_bits: bool
) -> BlockLaws:
    """The law of each block of a row ``[R, B]``, without filters."""
    x, _ = logit_blocks(logits, vocab_size, LAW_BLOCK)
    key = order_key(best_bits(visible_bits(x)).view(torch.float32)) if by_bits else largest_key(x)
    return block_laws(x, key, scale, moment=moment)


def block_laws(x: Tensor, keys: Tensor, scale: Tensor | None, *, moment: bool) -> BlockLaws:
    """The law of each block ``[R, B]`` of logits, float32 ``[R, B, n]``, relative to the logit of an order key."""
    row_max = key_float(keys)[..., None]
    row_scale = torch.full_like(row_max, LOG2_E) if scale is None else scale[:, None, None]
    t = scaled_logits(x, row_max, row_scale)  # of tokens that are not visible -inf or NaN: no mass
    return BlockLaws(keys, exp2_mass(t).sum(-1), exp2_moment(t).sum(-1) if moment else None)


def sum_block_laws(blocks: BlockLaws, scale: Tensor | None) -> Kept:
    """The law of each row ``[R]`` from those of its blocks; arguments as ``law_in_blocks``."""
    # A product of a block's weight and its mass is rounded to float64 and truncated to units of 2**-40, so sums do not
    # depend on their order.
    row_max = largest_logit(blocks.keys)
    cut = Cut(row_max, torch.full_like(row_max, LOG2_E) if scale is None else scale, None, None, None)
    t = scaled_logits(key_float(blocks.keys), cut.row_max[:, None], cut.scale[:, None])
    weights, masses = exp2_scaled(t).to(torch.float64) * _UNIT, blocks.masses.to(torch.float64)
    moment = None
    if blocks.moments is not None:
        below = -clamped(t).to(torch.float64)
        own = (weights * blocks.moments.to(torch.float64)).to(torch.int64)
        moment = (own + (weights * masses * below).to(torch.int64)).sum(-1)
    return Kept(cut, (weights * masses).to(torch.int64).sum(-1), moment, None, None)
