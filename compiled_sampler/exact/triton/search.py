"""The search for a threshold on CUDA: the last value with less than a limit of weight above it, exactly.

Values are keys, or the complements of ids where ties are cut. They are in a list, whose first tile stays in registers,
or in the row itself, where keys are not in the list or it was too short. Tiles are ``[DEPTH, LANES]``, a thread a lane.

``tokens`` is where a row's tokens are: ``(row, listed, in_list, size)``, its ``(logits, words)``, its list, whether to
read the list rather than the row, and how many there are. With ``MASKED`` a row's token whose bit in ``words`` is 0
counts as -inf; a list has none. ``scaling`` is ``(row_max, scale)``, the first finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.exact.triton.rows import (
    MASKED_KEY,
    between,
    complement,
    exp2_mass,
    key_float,
    load_logits,
    nearest,
    neighbours,
    order_key,
    read_entries,
)

_STEPS = tl.constexpr(2)  # between looks at which values exist: those save steps where values are few, and cost one
STREAM = tl.constexpr(8)
"""Depth of the tiles that are not in registers."""

NOTHING = tl.constexpr(MASKED_KEY.value)
"""No value of a list; a masked token in a row."""


@triton.jit
def places(LANES: tl.constexpr, DEPTH: tl.constexpr):
    """Numbers of a tile's tokens."""
    return tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def load_tile(row, listed, in_list, start, stop, LANES: tl.constexpr, DEPTH: tl.constexpr, MASKED: tl.constexpr):
    """Order keys and ids (int32) of a part of the list or of the row, and which of them exist."""
    at = start + places(LANES, DEPTH)
    inside = at < stop
    if in_list:
        key, token = read_entries(listed, at, inside)
    else:
        logits, words = row
        key = order_key(load_logits(logits, words, at, inside, MASKED).to(tl.float32))
        token = at
    return key, token, inside


@triton.jit
def masses(key, scaling):
    """The weights of tokens, int64."""
    row_max, scale = scaling
    return exp2_mass(key_float(key), row_max, scale)


@triton.jit
def _weight_above(values, exists, weights, pivots, most, MASS: tl.constexpr):
    """A tile's weight above each pivot, up to ``most``: ``[PIVOTS, LANES]``."""
    values = tl.where(exists & (values <= most), values, NOTHING)
    is_above = values[None, :, :] > pivots[:, None, None]
    return tl.sum(tl.where(is_above, weights[None, :, :], 0), 1) if MASS else tl.sum(is_above.to(tl.int32), 1)


@triton.jit
def _load_values(
    row, listed, in_list, start, stop, tie, OF_TIES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The values of a tile that are searched, and which of them exist."""
    value, token, exists = load_tile(row, listed, in_list, start, stop, LANES, DEPTH, MASKED)
    if OF_TIES:
        exists = exists & (value == tie)
        value = complement(token)
    return value, exists


# ``values`` are the int32 tile of the first of the list, of which ``NOTHING`` takes no part; with MASS their int64
# ``weights`` count, else each counts 1. With OF_TIES values are complements of the ids of the tokens whose key is
# ``tie``. In ``interval``, ``(least, most, above)``, the weight reaches the int64 ``limit`` with ``least``, int32,
# unless no value is below; the weight above ``most``, int32, is ``above``, int64, and does not.
@triton.jit
def last_value(
    values, weights, tokens, tie, interval, limit, scaling,
    MASS: tl.constexpr, OF_TIES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, PIVOTS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The last value with less than ``limit`` weight above it, int32, and that weight."""
    row, listed, in_list, size = tokens
    least, most, above = interval
    number = tl.arange(0, PIVOTS)
    by_key = number >= 0 if OF_TIES else number % 2 == 0
    start, stop = tl.where(in_list, LANES * DEPTH, 0), size
    STEP: tl.constexpr = LANES * STREAM
    num_steps = tl.where(OF_TIES, 0, _STEPS)  # ties are few: they are looked at first
    while least < most:
        for _ in range(num_steps):
            pivots = between(least, most - 1, number + 1, by_key, PIVOTS + 1)
            weight = _weight_above(values, values > NOTHING, weights, pivots, most, MASS)
            for at in range(start, stop, STEP):
                value, exists = _load_values(row, listed, in_list, at, stop, tie, OF_TIES, LANES, STREAM, MASKED)
                mass = masses(value, scaling) if MASS else value
                weight += _weight_above(value, exists, mass, pivots, most, MASS)
            weights_above = above + tl.sum(weight, 1).to(tl.int64)
            is_less = weights_above < limit
            least = tl.maximum(least, tl.max(tl.where(is_less | (pivots >= most), least, pivots + 1)))
            most = tl.minimum(most, tl.min(tl.where(is_less, pivots, most)))
            above = tl.maximum(above, tl.max(tl.where(is_less, weights_above, above)))
        near = neighbours(values, values > NOTHING, least, most)
        for at in range(start, stop, STEP):
            value, exists = _load_values(row, listed, in_list, at, stop, tie, OF_TIES, LANES, STREAM, MASKED)
            near = tl.maximum(near, neighbours(value, exists, least, most))
        smallest, largest = nearest(near)
        least = tl.minimum(tl.maximum(least, smallest), most)
        most = tl.maximum(largest, least)
        num_steps = _STEPS
        if OF_TIES and not in_list:  # ids are places
            start, stop = complement(most), tl.minimum(complement(least), size - 1) + 1
    return most, above
