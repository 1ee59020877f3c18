"""The filter top-n-sigma: tokens whose logit is within n standard deviations of the largest.

Source: Tang et al., "Top-n sigma: not all logits are you need", arXiv 2411.07641, as llama.cpp computes it: the
deviation is that of all tokens that no mask hides, divided by their number. It does not depend on the temperature.

Distances from the largest logit are counted in units that split the longest of a row into 2**31 steps, so their sums
and those of their squares are integers, exact in any order. The deviation is off by less than one such unit, by the
rounding of the distances, 2**-24 of each, and of the product with n to float32. Distances beyond the largest float32
count as that; logits and distances below the least normal one count as 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.core.arithmetic import reciprocal, square_root
from compiled_sampler.core.mass import FLOAT_MAX
from compiled_sampler.core.order import is_visible, key_float, order_key, row_logits, without_denormals
from compiled_sampler.core.rows import expand_to
from compiled_sampler.core.stage import holds
from compiled_sampler.edits.row_filters import TopNSigma
from compiled_sampler.passes.blocks import logit_blocks

_STEPS = 31  # bits of a distance; a square has twice as many, of which each half is summed
_LOW = 2**_STEPS - 1
_NO_KEY = 2**31 - 1
_FRACTION_BITS, _BIAS, _FLOAT_BIAS = 52, 1023, 127


class Distances(NamedTuple):
    """Sums over the finite logits of each block of a row, int64 ``[R, B]`` each; distances are in units of a row."""

    number: Tensor
    total: Tensor
    """Of distances from the row's largest logit."""
    high: Tensor
    """Of the high bits of their squares, in ``2**31``."""
    low: Tensor
    """Of the low 31 bits."""


@holds(tokens=True)
def logit_ends(logits: Tensor, *, vocab_size: int, block: int) -> tuple[Tensor, Tensor]:
    """The largest order key of each block, and that of its least visible logit: int32 ``[R, B]`` each."""
    x, _ = logit_blocks(logits, vocab_size, block)
    key = order_key(x)
    return key.amax(-1), torch.where(is_visible(x), key, _NO_KEY).amin(-1)


def distance_units(largest: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, float32 ``[R]``, and the steps of its unit of length, float64 ``[R]``: 2**n."""
    row_max = key_float(largest.amax(-1))
    longest = distance_below(row_max, key_float(least.amin(-1)))
    exponent = torch.where(longest > 0.0, longest, 0.0).view(torch.int32).to(torch.int64) >> 23
    return row_max, ((_BIAS + _STEPS + _FLOAT_BIAS - 1 - exponent) << _FRACTION_BITS).view(torch.float64)


@holds(tokens=True)
def distance_sums(logits: Tensor, row_max: Tensor, steps: Tensor, *, vocab_size: int, block: int) -> Distances:
    """The sums of each block of a row, ``[R, B]``."""
    x, _ = logit_blocks(logits, vocab_size, block)
    is_finite = is_visible(x) & (x < float("inf"))
    distance = torch.where(is_finite, distance_below(expand_to(row_max, x), x), 0.0)
    units = (distance.to(torch.float64) * expand_to(steps, x)).to(torch.int64)
    squares = units * units
    return Distances(
        is_finite.to(torch.int64).sum(-1), units.sum(-1), (squares >> _STEPS).sum(-1), (squares & _LOW).sum(-1)
    )


def longest_kept(sums: Distances, row_max: Tensor, steps: Tensor, slots: Tensor, top_n_sigma: TopNSigma) -> Tensor:
    """The longest distance from the largest logit that a token may have, float32 ``[R]``; inf keeps every token."""
    # A row with a +inf keeps all: the race is among such tokens anyway.
    number, total, high, low = (part.sum(-1).to(torch.float64) for part in sums)
    share = reciprocal(number)
    mean = total * share
    variance = (high * float(2**_STEPS) + low) * share - mean * mean
    unit = ((2 * _BIAS << _FRACTION_BITS) - steps.view(torch.int64)).view(torch.float64)  # 1 / steps
    deviation = square_root(torch.where(variance > 0.0, variance, 0.0)) * unit
    times = top_n_sigma.number[slots.clamp(min=0)]
    is_used = (times > 0.0) & (slots >= 0) & (row_max < float("inf"))
    return torch.where(is_used, (times * deviation).to(torch.float32), float("inf"))


@holds(tokens=True)
def within_distance(logits: Tensor, row_max: Tensor, longest: Tensor, *, vocab_size: int) -> Tensor:
    """The logits with -inf for tokens that are further than ``longest`` from the largest: float32 ``[R, V]``, new."""
    # A NaN stays, so that the status of its row says so.
    x = row_logits(logits, vocab_size)
    return torch.where(distance_below(row_max[:, None], x) > longest[:, None], float("-inf"), x)


def distance_below(top: Tensor, x: Tensor) -> Tensor:
    """``top - x``, at most the largest float; NaN for a NaN. Denormals count as 0, in every denormal mode."""
    distance = without_denormals(top) - without_denormals(x)
    return without_denormals(torch.where(distance > FLOAT_MAX, FLOAT_MAX, distance))
