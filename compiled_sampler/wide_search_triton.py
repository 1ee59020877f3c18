"""The search of the wide path on CUDA: the last value with less than a limit of weight above it, exactly.

Values are keys, or the complements of ids where ties are cut. They are in a list, whose first tile stays in registers,
or in the row itself, where keys are not in the list or it was too short. Tiles are ``[DEPTH, LANES]``, a thread a lane.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.wide_keys_triton import between, exp2_mass, key_float, nearest, neighbours, order_key

NOTHING = tl.constexpr(-2147483648)
"""No value of a list; a masked token in a row."""


@triton.jit
def places(LANES: tl.constexpr, DEPTH: tl.constexpr):
    """Numbers of a tile's tokens."""
    return tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def load_tile(row, keys, ids, listed, start, stop, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """Order keys and ids (int32) of a part of the list or of the row, and which of them exist."""
    at = start + places(LANES, DEPTH)
    inside = at < stop
    if listed:
        key = tl.load(keys + at, mask=inside, other=-2147483648)
        token = tl.load(ids + at, mask=inside, other=0)
    else:
        key = order_key(tl.load(row + at, mask=inside, other=float("-inf")).to(tl.float32))
        token = at
    return key, token, inside


@triton.jit
def masses(key, row_max, scale):
    """The weights of tokens, int64."""
    return exp2_mass(key_float(key), row_max, scale)


@triton.jit
def _weight_above(values, exists, weights, pivots, high, MASS: tl.constexpr):
    """A tile's weight above each pivot, up to ``high``: ``[PIVOTS, LANES]``."""
    values = tl.where(exists & (values <= high.to(tl.int32)), values, NOTHING)
    is_above = values[None, :, :] > pivots[:, None, None]
    if MASS:
        weight = tl.sum(tl.where(is_above, weights[None, :, :], 0), 1)
    else:
        weight = tl.sum(is_above.to(tl.int32), 1)
    return weight


@triton.jit
def last_value(
    values, weights, row, keys, ids, listed, size, tie, low, high, above, limit, row_max, scale,
    MASS: tl.constexpr, OF_TIES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The last value with less than ``limit`` weight above it, int64, and that weight.

    Args:
        values: int32 tile of the first of the list; ``NOTHING`` takes no part.
        weights: int64 tile, if masses are what counts.
        row: logits.
        keys: of the list.
        ids: of the list.
        listed: whether to search the list rather than the row.
        size: of the list or the row.
        tie: the key of the ties whose ids are searched.
        low: int64; the weight above it reaches the limit, unless no value is below.
        high: int64; the weight above it, ``above``, is less.
        above: int64.
        limit: int64.
        row_max: finite maximum of the row.
        scale: of the row.
        MASS: whether weights are masses rather than all 1.
        OF_TIES: whether values are complements of the ids of ties, in place of keys.
        LANES: of a tile.
        DEPTH: of a tile.
        PIVOTS: tested a step.
    """
    number = tl.arange(0, PIVOTS)
    resident = tl.where(listed, LANES * DEPTH, 0)
    while high - low > 1:
        start, stop = resident, size
        if OF_TIES:
            if not listed:  # ids are places
                start = tl.maximum(2147483647 - high, 0).to(tl.int32)
                stop = tl.minimum(2147483647 - low, size).to(tl.int32)
        near = neighbours(values, values > NOTHING, low, high)
        for at in range(start, stop, LANES * DEPTH):
            value, token, exists = load_tile(row, keys, ids, listed, at, stop, LANES, DEPTH)
            if OF_TIES:
                exists = exists & (value == tie)
                value = 2147483647 - token
            near = tl.maximum(near, neighbours(value, exists, low, high))
        lowest, highest = nearest(near)
        low = tl.maximum(low, tl.minimum(lowest, high) - 1)
        high = tl.maximum(highest, low + 1)
        if high - low > 1:
            pivots = between(low, high, number + 1, PIVOTS + 1, not OF_TIES)
            weight = _weight_above(values, values > NOTHING, weights, pivots, high, MASS)
            for at in range(start, stop, LANES * DEPTH):
                value, token, exists = load_tile(row, keys, ids, listed, at, stop, LANES, DEPTH)
                if OF_TIES:
                    exists = exists & (value == tie)
                    value = 2147483647 - token
                mass = weights
                if MASS:
                    mass = masses(value, row_max, scale)
                weight += _weight_above(value, exists, mass, pivots, high, MASS)
            found = above + tl.sum(weight, 1).to(tl.int64)
            enough = found >= limit
            pivots = pivots.to(tl.int64)
            low = tl.maximum(low, tl.max(tl.where(enough, pivots, low)))
            high = tl.minimum(high, tl.min(tl.where(enough, high, pivots)))
            above = tl.maximum(above, tl.max(tl.where(enough, above, found)))
    return high, above
