"""Keys and masses in Triton, as ``order.py`` and ``mass.py`` define them, and the step of a search among keys.

A search halves nothing: a reduction over a block costs more than its arithmetic, so each step asks for the weight above
several pivots at once. Intervals of keys are given by the least and the most of them, int32.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from compiled_sampler.core.mass import EXP2, FLOAT_MAX, MASS_BITS
from compiled_sampler.core.polynomial import MAGIC, MAGIC_BITS

ANYWHERE = ["logits", "row_maxima", "row_masses", "scales", "top_ks", "top_ps", "pendings", "packed", "found"]
ANYWHERE += ["raced", "founds", "part_masses"]
ANYWHERE += ["beyonds", "magnitudes", "part_winners", "noise_masks", "min_ps", "firsts", "seconds", "thirds", "fourths"]
"""Arguments that may start at any address: another alignment would compile inside an engine's capture."""

ANY_NUMBER = ["row_stride", "vocab_size", "tiles", "draws", "num_rows", "num_parts", "part_size"]
"""Numbers of which none has a kernel of its own."""

_MAGIC, _MAGIC_BITS = tl.constexpr(MAGIC), tl.constexpr(MAGIC_BITS)
_C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in EXP2[1:])
_FLOAT_MAX, _MASS_BITS = tl.constexpr(FLOAT_MAX), tl.constexpr(MASS_BITS)
FLOAT_MAX_KEY = tl.constexpr(0x7F7FFFFF)
"""The order key of the largest float."""


@functools.cache
def early(device: torch.device) -> dict[str, bool]:
    """How a kernel is launched that starts while the one before it ends, and begins by waiting for that end.

    GPUs before Hopper launch one after the other, and so does Triton's interpreter.
    """
    can = torch.version.hip is None and not triton.knobs.runtime.interpret
    can = can and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


@triton.jit
def last_look(logits, inside):
    """Logits at these pointers, -inf where none is ``inside``, for a pass after which the cache need not keep them."""
    return tl.load(logits, mask=inside, other=float("-inf"), eviction_policy="evict_first")


@triton.jit
def order_key(x):
    """``order.order_key``."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x > float("-inf"), tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits), -2147483648)


@triton.jit
def key_float(key):
    """``order.key_float``; a NaN for keys that no logit has."""
    x = tl.where(key < 0, -2147483648 - key, key).to(tl.float32, bitcast=True)
    return tl.where(key == -2147483648, float("-inf"), x)


@triton.jit
def finite(row_max):
    """The maximum that ``mass.scaled_logits`` subtracts."""
    return tl.minimum(tl.maximum(row_max, -_FLOAT_MAX), _FLOAT_MAX)


@triton.jit
def exp2_mass(x, row_max, scale):
    """``mass.exp2_mass`` of the scaled logits."""
    t = (x - row_max) * scale
    t = tl.where(t > -64.0, t, -64.0)
    t = tl.where(t < 0.0, t, 0.0)
    shifted = t + _MAGIC
    f = t - (shifted - _MAGIC)
    p = _C5 * f + _C4
    p = p * f + _C3
    p = p * f + _C2
    p = p * f + _C1
    p = p * f + 1.0
    bits = p.to(tl.int32, bitcast=True) + ((shifted.to(tl.int32, bitcast=True) - _MAGIC_BITS + _MASS_BITS) << 23)
    return bits.to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def mass_cut(top_p, base):
    """``filters.mass_cut`` of a ``top_p`` below 1."""
    product = top_p * base.to(tl.float64)
    cut = product.to(tl.int64)
    return cut + tl.where(cut.to(tl.float64) < product, 1, 0)


@triton.jit
def between(least, most, numerator, by_key, DENOMINATOR: tl.constexpr):
    """Pivots (int32) from ``least`` to ``most`` at ``numerator / DENOMINATOR`` of the way.

    Logits are spread evenly over floats, unless there are outliers such as masks of -1e38: then over keys, rather.

    Args:
        least: int32, a scalar or the shape of ``numerator``.
        most: as ``least``; below it, it counts as the same.
        numerator: int32.
        by_key: bool, whether the way is one of keys rather than of the floats they stand for.
        DENOMINATOR: of the fractions.
    """
    width = tl.where(most < least, 0, most - least).to(tl.uint32)  # which wraps at 32 bits, as the sum below
    part = numerator.to(tl.uint32) * (4294967296 // DENOMINATOR)
    key = least + tl.umulhi(width, part).to(tl.int32)
    part = numerator.to(tl.float32) * (1.0 / DENOMINATOR)
    start = key_float(tl.maximum(least, -FLOAT_MAX_KEY))
    end = key_float(tl.minimum(most, FLOAT_MAX_KEY))
    by_value = tl.maximum(tl.minimum(order_key(start * (1.0 - part) + end * part), most), least)
    return tl.where(by_key, key, by_value)


@triton.jit
def neighbours(values, exists, least, most):
    """The smallest of the values from ``least``, complemented, and the largest up to ``most``: int32 ``[2, LANES]``.

    Maxima of both, over lanes and tiles: one reduction of two rows waits once.

    Args:
        values: int32 ``[DEPTH, LANES]``.
        exists: of those values, the ones that count.
        least: int32.
        most: int32.
    """
    is_largest = tl.arange(0, 2)[:, None, None] == 1
    values, exists = values[None, :, :], exists[None, :, :]
    wanted = exists & tl.where(is_largest, values <= most, values >= least)
    return tl.max(tl.where(wanted, tl.where(is_largest, values, ~values), -2147483648), 1)


@triton.jit
def nearest(near):
    """The smallest and the largest value, int32 scalars, of what ``neighbours`` gives."""
    ends = tl.max(near, 1)
    is_largest = tl.arange(0, 2) == 1
    smallest = ~tl.max(tl.where(is_largest, -2147483648, ends))
    return smallest, tl.max(tl.where(is_largest, ends, -2147483648))
