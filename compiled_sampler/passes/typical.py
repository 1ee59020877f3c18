"""The filter typical-p: tokens whose surprise is near the entropy of the row's law, up to a share of its mass.

Source: Meister et al., "Locally typical sampling", arXiv 2202.00666, as transformers has it: in the order of the
distance ``|-log p - entropy|``, keep tokens while the mass before them is below ``typical_p``; tokens as far as the
last one stay with it.

With scaled logits t, a token's surprise less the entropy is ``mean - t`` in bits, the mean of t taken in the law: the
total cancels. Scaled logits nearer to 0 than ``2**-40`` count as 0, in every denormal mode; the mean is off by
``2**-40`` a token, by ``2**-23`` of itself, and a distance is rounded to float32 once. The furthest distance that is
kept is then found exactly, digit by digit, by integer masses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.core.mass import MASS_BITS, exp2_mass, reciprocal
from compiled_sampler.core.order import is_visible, row_logits
from compiled_sampler.core.rows import expand_to
from compiled_sampler.edit_tables import TypicalP
from compiled_sampler.passes.blocks import logit_blocks
from compiled_sampler.passes.mass_filters import MassSums, MassUnits, scaled

DIGIT_BITS = 4
"""Bits of a distance that one pass over the rows finds."""
NUM_DIGITS = 8
"""Passes, the first of which finds the highest bits."""
_EVERY_KEY = 2**31 - 1
_GRAIN = 2.0**-MASS_BITS
_LAST = (1 << DIGIT_BITS) - 1


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
    shift: Tensor
    """int32 ``[R]``, the bits behind the next digit; a tensor, so that one kernel finds every digit."""


def typical_search(sums: MassSums, units: MassUnits, slots: Tensor, given: TypicalP) -> Search:
    """The search of each row ``[R]`` before its first digit is known.

    Args:
        sums: ``[R, B]``, with moments.
        units: ``[R]``.
        slots: int64 ``[R]``; -1 for padding.
        given: by slot.
    """
    assert sums.moment is not None
    total = sums.total.sum(-1).to(torch.float64)
    mean = (sums.moment.sum(-1).to(torch.float64) * reciprocal(total)).to(torch.float32)
    share = given.share[slots.clamp(min=0)]
    is_used = (share < 1.0) & (slots >= 0) & (units.row_max < float("inf"))
    wanted = torch.where(is_used, (share * total).ceil().to(torch.int64), 0)
    none = torch.zeros_like(wanted)
    prefix = none.to(torch.int32)
    return Search(units, _grained(0.0 - mean), wanted, prefix, none, prefix + DIGIT_BITS * (NUM_DIGITS - 1))


def digit_masses(logits: Tensor, search: Search, *, vocab_size: int, block: int) -> Tensor:
    """The mass of tokens with the prefix of each row, by their next digit: int64 ``[R, B, 2**DIGIT_BITS]``.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        search: ``[R]``.
        vocab_size: V.
        block: tokens per block; no sum over a row depends on it.
    """
    x, _ = logit_blocks(logits, vocab_size, block)
    t = scaled(x, search.units)
    key = _distance_key(t, expand_to(search.mean, x)) >> expand_to(search.shift, x)
    mass = torch.where(is_visible(x), exp2_mass(t), 0)
    first = expand_to(search.prefix, x) << DIGIT_BITS
    return torch.stack([torch.where(key == first + each, mass, 0).sum(-1) for each in range(1 << DIGIT_BITS)], -1)


def with_digit(search: Search, masses: Tensor) -> Search:
    """The search of each row ``[R]`` with one more digit: the first up to which the mass is reached.

    Args:
        search: ``[R]``.
        masses: int64 ``[R, B, n]``, from ``digit_masses``.
    """
    of_digit = masses.sum(1)
    reached = search.before[:, None] + of_digit.cumsum(-1)
    is_below = (reached < search.wanted[:, None]) & (torch.arange(of_digit.shape[1], device=masses.device) < _LAST)
    digit = is_below.to(torch.int32).sum(-1, dtype=torch.int32)
    before = search.before + torch.where(is_below, of_digit, 0).sum(-1)
    prefix, shift = (search.prefix << DIGIT_BITS) + digit, search.shift - DIGIT_BITS
    return Search(search.units, search.mean, search.wanted, prefix, before, shift)


def within_typical(logits: Tensor, search: Search, *, vocab_size: int) -> Tensor:
    """The logits with -inf for tokens beyond the distance of their row: float32 ``[R, V]`` in new memory.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        search: ``[R]``, of which all digits are known.
        vocab_size: V.
    """
    x = row_logits(logits, vocab_size)
    furthest = torch.where(search.wanted > 0, search.prefix, _EVERY_KEY)[:, None]
    key = _distance_key(scaled(x, search.units), search.mean[:, None])
    return torch.where(is_visible(x) & (key > furthest), float("-inf"), x)


def _distance_key(t: Tensor, mean: Tensor) -> Tensor:
    """The bits of ``|t - mean|``, int32, which ascend with it."""
    return (_grained(t) - mean).view(torch.int32) & _EVERY_KEY


def _grained(t: Tensor) -> Tensor:
    return torch.where(t > -_GRAIN, 0.0, t)
