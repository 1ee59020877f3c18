"""The filter typical-p: tokens whose surprise is near the entropy of the row's law, up to a share of its mass.

Source: Meister et al., "Locally typical sampling", arXiv 2202.00666, as transformers has it: in the order of the
distance ``|-log p - entropy|``, keep tokens while the mass before them is below ``typical_p``; tokens as far as the
last one stay with it.

With scaled logits t, a token's surprise less the entropy is ``mean - t`` in bits, the mean of t taken in the law: the
total cancels. Scaled logits nearer to 0 than ``2**-40`` count as 0, in every denormal mode; the mean is off by
``2**-40`` a token, by ``2**-23`` of itself, and a distance is rounded to float32 once. The furthest distance that is
kept is then found exactly, digit by digit, by integer masses.

A digit has a thousand values, so its masses are added up in memory, as float64: the tokens of one value on one side of
the mean have masses of a few neighbouring exponents, of 24 bits each, so 2**22 of them have an exact sum in any order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.core.arithmetic import reciprocal
from compiled_sampler.core.mass import MASS_BITS, exp2_units
from compiled_sampler.core.order import indices, is_visible, row_logits
from compiled_sampler.core.stage import holds
from compiled_sampler.edits.row_filters import TypicalP
from compiled_sampler.passes.p_less_and_xtc import MassSums, MassUnits, scaled

NUM_DIGITS = 3
"""Passes, the first of which finds the highest bits of a distance."""
_DIGIT_BITS = 10
_VALUES = 1 << (31 - (NUM_DIGITS - 1) * _DIGIT_BITS)
"""Of the first digit, which has a bit more; the later ones have half as many."""
_NOWHERE = 2 * _VALUES
_SPARE = 1024
"""Places where tokens that do not count add nothing: neighbours add to neighbours, which is one transaction a warp."""
_EVERY_KEY = 2**31 - 1
_GRAIN = 2.0**-MASS_BITS
_MANTISSA, _BIAS = 52, 1023


class Search(NamedTuple):
    """What is known of the furthest distance that each row ``[R]`` keeps."""

    units: MassUnits
    mean: Tensor
    """float32 ``[R]``, the mean of scaled logits in the law."""
    wanted: Tensor
    """int64 ``[R]``, the mass that the kept tokens reach; 0 for rows that keep every token."""
    prefix: Tensor
    """int32 ``[R]``, the first digits of the distance's bits."""
    before: Tensor
    """int64 ``[R]``, the mass of tokens that are nearer than all with these digits."""
    reach: Tensor
    """int32 ``[R]``, the bits of a distance within which the mass is surely reached."""
    shift: Tensor
    """int32 ``[R]``, the bits behind the next digit; a tensor, so that one kernel finds every digit."""


def typical_search(sums: MassSums, units: MassUnits, slots: Tensor, typical_p: TypicalP, *, vocab_size: int) -> Search:
    """The search of each row ``[R]`` before its first digit is known."""
    assert sums.moment is not None
    mass = sums.total.sum(-1)
    total = mass.to(torch.float64)
    mean = _grained(0.0 - (sums.moment.sum(-1).to(torch.float64) * reciprocal(total)).to(torch.float32))
    share = typical_p.share[slots.clamp(min=0)]
    is_used = (share < 1.0) & (slots >= 0) & (units.row_max < float("inf"))
    cut = torch.minimum((share * total).ceil().to(torch.int64), mass)  # a share near 1 may round to more than all
    wanted = torch.where(is_used, cut, 0)
    none = torch.zeros_like(wanted)
    prefix = none.to(torch.int32)
    reach = _reach(mass - wanted, mean, vocab_size)
    return Search(units, mean, wanted, prefix, none, reach, prefix + _DIGIT_BITS * (NUM_DIGITS - 1))


def _reach(spare: Tensor, mean: Tensor, vocab_size: int) -> Tensor:
    """``Search.reach``: V tokens below some scaled logit are lighter than the mass that need not be reached."""
    # spare is the mass that may be left out.
    exponent = (spare.to(torch.float64).view(torch.int64) >> _MANTISSA) - _BIAS
    light = (exponent - (2 + MASS_BITS + vocab_size.bit_length())).to(torch.float32)  # two bits for roundings
    lowest = torch.where(spare > 0, light, -float(_EVERY_KEY))
    return torch.maximum(mean - lowest, 0.0 - mean).view(torch.int32)


@holds(tokens=True)
def digit_masses(logits: Tensor, search: Search, *, vocab_size: int) -> Tensor:
    """The mass of tokens with the prefix of each row, by their next digit: float64 ``[R, n]``, all integers."""
    # Those below the mean of scaled logits come first, then those above, then zeros.
    x = row_logits(logits, vocab_size)
    t, mean = scaled(x, search.units), search.mean[:, None]
    key = _distance_key(t, mean)
    digit = (key >> search.shift[:, None]) - (search.prefix << _DIGIT_BITS)[:, None]
    mass = torch.where(is_visible(x), exp2_units(t), 0.0)
    counts = (mass > 0.0) & (key <= search.reach[:, None]) & (digit >= 0) & (digit < _VALUES)
    nowhere = _NOWHERE + (indices(vocab_size, x.device) & (_SPARE - 1))
    place = torch.where(counts, torch.where(t > mean, digit + _VALUES, digit), nowhere).to(torch.int64)
    sums = torch.zeros((x.shape[0], _NOWHERE + _SPARE), dtype=torch.float64, device=x.device)
    return sums.scatter_add(1, place, torch.where(counts, mass, 0.0).to(torch.float64))


def with_digit(search: Search, masses: Tensor) -> Search:
    """The search of each row ``[R]`` with one more digit: the first up to which the mass is reached."""
    below, above = masses[:, :_VALUES].to(torch.int64), masses[:, _VALUES:_NOWHERE].to(torch.int64)
    digit_mass = below + above
    reached = search.before[:, None] + digit_mass.cumsum(-1)
    is_below = (reached < search.wanted[:, None]) & (torch.arange(_VALUES, device=masses.device) < _VALUES - 1)
    digit = is_below.to(torch.int32).sum(-1, dtype=torch.int32)
    before = search.before + torch.where(is_below, digit_mass, 0).sum(-1)
    prefix, shift = (search.prefix << _DIGIT_BITS) + digit, search.shift - _DIGIT_BITS
    return Search(search.units, search.mean, search.wanted, prefix, before, search.reach, shift)


@holds(tokens=True)
def within_typical(logits: Tensor, search: Search, *, vocab_size: int) -> Tensor:
    """The logits with -inf for tokens beyond the distance of their row: float32 ``[R, V]`` in new memory."""
    x = row_logits(logits, vocab_size)
    furthest = torch.where(search.wanted > 0, search.prefix, _EVERY_KEY)[:, None]
    key = _distance_key(scaled(x, search.units), search.mean[:, None])
    return torch.where(is_visible(x) & (key > furthest), float("-inf"), x)


def _distance_key(t: Tensor, mean: Tensor) -> Tensor:
    """The bits of ``|t - mean|``, int32, which ascend with it."""
    return (_grained(t) - mean).view(torch.int32) & _EVERY_KEY


def _grained(t: Tensor) -> Tensor:
    return torch.where(t > -_GRAIN, 0.0, t)
