"""The stages of the filters of whole rows: top-n-sigma, min-k, p-less, typical-p and XTC ("exclude top choices").

A row with a ``+inf`` passes as it is: the race is among such tokens anyway. A NaN stays, so that the status of its row
says so. Those that look at probabilities see the law at the temperature of the request, in integer masses
(``core/mass.py``), so that sums are exact in any order and a comparison has one answer on every path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.core.arithmetic import reciprocal, square_root
from compiled_sampler.core.mass import (
    FLOAT_MAX,
    MASS_BITS,
    exp2_mass,
    exp2_moment,
    exp2_square,
    exp2_units,
    scaled_logits,
)
from compiled_sampler.core.noise import XTC, noise_keys, uniform
from compiled_sampler.core.order import indices, is_visible, key_float, order_key, pack, row_logits, without_denormals
from compiled_sampler.core.rows import RowSlots, expand_to
from compiled_sampler.core.stage import holds
from compiled_sampler.edits.row_filters import MinK, PLess, TopNSigma, TypicalP, Xtc
from compiled_sampler.passes.blocks import logit_blocks

_FRACTION_BITS, _BIAS, _FLOAT_BIAS = 52, 1023, 127  # of float64, and of float32

# Top-n-sigma: tokens whose logit is within n standard deviations of the largest.
#
# Source: Tang et al., "Top-n sigma: not all logits are you need", arXiv 2411.07641, as llama.cpp computes it: the
# deviation is that of all tokens that no mask hides, divided by their number. It does not depend on the temperature.
#
# Distances from the largest logit are counted in units that split the longest of a row into 2**31 steps, so their sums
# and those of their squares are integers, exact in any order. The deviation is off by less than one such unit, by the
# rounding of the distances, 2**-24 of each, and of the product with n to float32. Distances beyond the largest float32
# count as that; logits and distances below the least normal one count as 0.

_STEPS = 31  # bits of a distance; a square has twice as many, of which each half is summed
_LOW = 2**_STEPS - 1
_NO_KEY = 2**31 - 1


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


# Min-k: the tokens before the cliff of a row, the steepest drop of its logits in descending order.
#
# Source: Ding et al., "Min-k sampling: decoupling truncation from temperature scaling via relative logit dynamics",
# arXiv 2604.11012, whose algorithm 1 is taken as vLLM's open pull request 48142 has it. Of the n tokens that no mask
# hides, in descending order ``x_1 >= ... >= x_n`` with the range ``x_1 - x_n``, the first k stay: the larger of
# ``argmax_i (x_i - x_{i+1}) / (range * i)`` over the n - 1 drops, the cliff, and of ``floor(tau / range)``. The range
# is the same for all drops of a row, so the cliff is found without it; the first of equal drops counts. Tokens with the
# logit of the k-th stay too, so in a row of equal logits all do.
#
# The drops and the range are each rounded once to float32, at most the largest; denormals count as 0. What follows is
# exact, however a compiler orders it: quotients of such a drop and a rank below 2**22 that differ do so by ``2**-46``
# of themselves, so products with reciprocals, which are off by ``2**-50``, tell the first of the largest; and a rank
# times the range has 46 bits.

_NEARLY = 1.0 - 2.0**-48


@holds(tokens=True)
def drop_keys(logits: Tensor, *, vocab_size: int) -> Tensor:
    """The order keys of a row's logits, int32 ``[R, V]``, with that of 0 for denormals."""
    return order_key(without_denormals(row_logits(logits, vocab_size)))


def descending(keys: Tensor) -> Tensor:
    """The keys of each row in descending order: int32 ``[R, V]``."""
    return keys.sort(-1, descending=True).values


def cliff_logit(ordered: Tensor, slots: Tensor, min_k: MinK) -> Tensor:
    """The least logit that a token may have, float32 ``[R]``; -inf keeps every token."""
    # A row with a +inf keeps all: the race is among such tokens anyway.
    x = key_float(ordered)
    following = F.pad(x[:, 1:], (0, 1), value=float("-inf"))
    rank = indices(x.shape[1], x.device) + 1
    cliff = first_steepest(torch.where(is_visible(following), distance_below(x, following), 0.0), rank)
    least = torch.where(is_visible(x), x, float("inf")).amin(-1)
    length = distance_below(x[:, 0], least).to(torch.float64)
    tau = min_k.tau[slots.clamp(min=0)]
    is_kept = (rank <= cliff[:, None]) | (rank.to(torch.float64) * length[:, None] <= tau[:, None])
    last = torch.where(is_kept & is_visible(x), x, float("inf")).amin(-1)
    is_used = (tau >= 0.0) & (slots >= 0) & (x[:, 0] < float("inf"))
    return torch.where(is_used, last, float("-inf"))


def first_steepest(drop: Tensor, rank: Tensor) -> Tensor:
    """The first rank of the largest quotient of a drop and its rank: int32 ``[R]``."""
    # drop: float32 [R, n], >= 0, no denormal; rank: int32 [n], in [1, 2**22).
    weight = drop.to(torch.float64) * reciprocal(rank.to(torch.float64))
    is_steepest = weight >= weight.amax(-1, keepdim=True) * _NEARLY
    return torch.where(is_steepest, rank, 2**22).amin(-1)


@holds(tokens=True)
def above_cliff(logits: Tensor, least: Tensor, *, vocab_size: int) -> Tensor:
    """The logits with -inf for those below ``least``: float32 ``[R, V]`` in new memory."""
    # A NaN stays, so that the status of its row says so.
    x = row_logits(logits, vocab_size)
    return torch.where(without_denormals(x) < least[:, None], float("-inf"), x)


# The masses of a row, which p-less, typical-p and XTC compare.


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


def scaled(x: Tensor, units: MassUnits) -> Tensor:
    """The scaled logits of tokens, float32 ``[R, ...]``, in the units of their row ``[R]``."""
    return scaled_logits(x, expand_to(units.row_max, x), expand_to(units.scale, x))


# P-less: tokens with ``p >= sum(p**2)``, which the likeliest has.
#
# Source: Tan et al., "p-less sampling", arXiv 2509.23234.


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


# Typical-p: tokens whose surprise is near the entropy of the row's law, up to a share of its mass.
#
# Source: Meister et al., "Locally typical sampling", arXiv 2202.00666, as transformers has it: in the order of the
# distance ``|-log p - entropy|``, keep tokens while the mass before them is below ``typical_p``; tokens as far as the
# last one stay with it.
#
# With scaled logits t, a token's surprise less the entropy is ``mean - t`` in bits, the mean of t taken in the law: the
# total cancels. Scaled logits nearer to 0 than ``2**-40`` count as 0, in every denormal mode; the mean is off by
# ``2**-40`` a token, by ``2**-23`` of itself, and a distance is rounded to float32 once. The furthest distance that is
# kept is then found exactly, digit by digit, by integer masses.
#
# A digit has a thousand values, so its masses are added up in memory, as float64: the tokens of one value on one side
# of the mean have masses of a few neighbouring exponents, of 24 bits each, so 2**22 of them have an exact sum in any
# order.

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


class TypicalSearch(NamedTuple):
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


def typical_search(
    sums: MassSums, units: MassUnits, slots: Tensor, typical_p: TypicalP, *, vocab_size: int
) -> TypicalSearch:
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
    return TypicalSearch(units, mean, wanted, prefix, none, reach, prefix + _DIGIT_BITS * (NUM_DIGITS - 1))


def _reach(spare: Tensor, mean: Tensor, vocab_size: int) -> Tensor:
    """``TypicalSearch.reach``: V tokens below some scaled logit are lighter than the mass that need not be reached."""
    # spare is the mass that may be left out.
    exponent = (spare.to(torch.float64).view(torch.int64) >> _FRACTION_BITS) - _BIAS
    light = (exponent - (2 + MASS_BITS + vocab_size.bit_length())).to(torch.float32)  # two bits for roundings
    lowest = torch.where(spare > 0, light, -float(_EVERY_KEY))
    return torch.maximum(mean - lowest, 0.0 - mean).view(torch.int32)


@holds(tokens=True)
def digit_masses(logits: Tensor, search: TypicalSearch, *, vocab_size: int) -> Tensor:
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


def with_digit(search: TypicalSearch, masses: Tensor) -> TypicalSearch:
    """The search of each row ``[R]`` with one more digit: the first up to which the mass is reached."""
    below, above = masses[:, :_VALUES].to(torch.int64), masses[:, _VALUES:_NOWHERE].to(torch.int64)
    digit_mass = below + above
    reached = search.before[:, None] + digit_mass.cumsum(-1)
    is_below = (reached < search.wanted[:, None]) & (torch.arange(_VALUES, device=masses.device) < _VALUES - 1)
    digit = is_below.to(torch.int32).sum(-1, dtype=torch.int32)
    before = search.before + torch.where(is_below, digit_mass, 0).sum(-1)
    prefix, shift = (search.prefix << _DIGIT_BITS) + digit, search.shift - _DIGIT_BITS
    return TypicalSearch(search.units, search.mean, search.wanted, prefix, before, search.reach, shift)


@holds(tokens=True)
def within_typical(logits: Tensor, search: TypicalSearch, *, vocab_size: int) -> Tensor:
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


# XTC, "exclude top choices": with a given probability, drop all tokens with ``p >= threshold`` but the last of them in
# the order.
#
# Source: text-generation-webui's pull request 6335, as llama.cpp has it.

_ABOVE_ALL = 2**63 - 1


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
