"""A row in Triton: the record that the kernels of a search leave each other of it; its keys, masses, pivots and loads.

A row has a record of each: its brackets, its sums, and its list, the logits and the ids of the tokens that the pass
over the row found worth a look. An entry of the list is an int64, the bits of the logit above the id: one store, at one
address.

Keys and masses are as ``order.py``, ``mass.py`` and ``filters.py`` define them. A search halves nothing: a reduction
over a block costs more than its arithmetic, so each step asks for the weight above several pivots at once. Intervals of
keys are given by the least and the most of them, int32.

Inductor copies what a kernel calls into its own module by name, functions and constants but no classes. So numbers that
belong together travel as plain tuples here, and no two functions or constants of this folder have the same name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from compiled_sampler.core.arithmetic import MAGIC, MAGIC_BITS
from compiled_sampler.core.filters import KEEP_ALL as _KEEP_ALL
from compiled_sampler.core.mass import EXP2, FLOAT_MAX, MASS_BITS
from compiled_sampler.core.order import MASKED_KEY as _MASKED_KEY
from compiled_sampler.core.order import POSITIVE_INFINITY_KEY as _POSITIVE_INFINITY_KEY
from compiled_sampler.exact.triton import SPARE as SPARE_ENTRIES

# Fields of int32 brackets. A filter's bracket is the first and the last key between which that of its last kept token
# probably lies, at BRACKET_FIRST and BRACKET_LAST from TOP_K_BRACKET or TOP_P_BRACKET.
BRACKET_FIRST, BRACKET_LAST = tl.constexpr(0), tl.constexpr(1)
TOP_K_BRACKET, TOP_P_BRACKET = tl.constexpr(0), tl.constexpr(2)
FEW_ABOVE = tl.constexpr(4)  # 1 where the list also holds what is above the bracket, as that is little
IS_OPEN = tl.constexpr(5)  # 1 where the row is still open: no part of it has proven that its winner is kept
WINNER_KEY = tl.constexpr(6)  # order key of the winner of a race, if MASS_AFTER_WINNER decides; else MASKED_KEY
BRACKET_FIELDS = tl.constexpr(8)

# Fields of int64 sums. A filter's are the exact weight above its bracket, and with the bracket, at WEIGHT_ABOVE and
# WEIGHT_WITH from TOP_K_TOKENS or TOP_P_MASS.
WEIGHT_ABOVE, WEIGHT_WITH = tl.constexpr(0), tl.constexpr(1)
TOP_K_TOKENS = tl.constexpr(0)
TOP_K_MASS_ABOVE = tl.constexpr(2)  # above top-k's bracket, where the base of top-p is not the row
TOP_P_MASS = tl.constexpr(3)
LIST_SIZE = tl.constexpr(5)  # tokens listed, also those for which there was no room
# Of the tokens with smaller logits than the winner of the race. Without the winner and its ties it is at most the mass
# from the winner on, by which top-p decides: a winner that it keeps is kept, one that it drops may be.
MASS_AFTER_WINNER = tl.constexpr(6)
SUM_FIELDS = tl.constexpr(8)

SPARE = tl.constexpr(SPARE_ENTRIES)
_MASKED_ENTRY = tl.constexpr(-0x800000 << 32)  # -inf, whose bits are 0xFF800000, and token 0

OWN = frozenset({"brackets", "sums", "lists", "open_rows"})
"""Arguments that every launch allocates for itself, and that therefore start where an allocation does."""

MASKED_KEY = tl.constexpr(_MASKED_KEY)
"""``order.MASKED_KEY``, the smallest int32: the key of a token that cannot be drawn, order key or score key."""

LOWEST_KEY = tl.constexpr(_MASKED_KEY + 1)
"""The smallest key above it."""

HIGHEST_KEY = tl.constexpr(-(_MASKED_KEY + 1))
"""The largest int32, above the order key of every logit."""

FLOAT_MAX_KEY = tl.constexpr(0x7F7FFFFF)
"""The order key of the largest float."""

POSITIVE_INFINITY_KEY = tl.constexpr(_POSITIVE_INFINITY_KEY)
"""``order.POSITIVE_INFINITY_KEY``."""

ID_MASK = tl.constexpr(0x7FFFFFFF)
"""Bits of a packed key that hold an id, complemented; also those of a float's magnitude."""

KEEP_ALL = tl.constexpr(_KEEP_ALL)
"""``filters.KEEP_ALL``, the smallest int64: the threshold that every packed key reaches."""

NO_WINNER = tl.constexpr(_KEEP_ALL)
"""``row_race.NO_WINNER``, the same number: the winner of a row or of a part that did not race."""

UNKNOWN_WINNER = tl.constexpr(-(_KEEP_ALL + 1))
"""The largest int64, above the packed key of every winner."""

_MAGIC, _MAGIC_BITS = tl.constexpr(MAGIC), tl.constexpr(MAGIC_BITS)
_C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in EXP2[1:])
_FLOAT_MAX, _MASS_BITS = tl.constexpr(FLOAT_MAX), tl.constexpr(MASS_BITS)


def kernel(function: Callable[..., Any]) -> Any:
    """A Triton kernel that one compiled form serves for whatever addresses and numbers it is launched with."""
    # An argument that may be a caller's, or a view, can start at any address, and a number of rows can be 1 or a
    # multiple of 16. If one of these had a compiled form of its own, the first such launch would compile, perhaps
    # within an engine's capture. So no argument is specialised but the constants and those of OWN.
    parameters = inspect.signature(function).parameters.items()
    numbers = [name for name, item in parameters if item.annotation != "tl.constexpr" and name not in OWN]
    return triton.jit(function, do_not_specialize=numbers)


@triton.jit
def list_of(lists, index, STRIDE: tl.constexpr):
    """Where the list of a row begins."""
    return lists + index.to(tl.int64) * STRIDE


@triton.jit
def write_entries(listed, at, x, ids, is_listed):
    """Write float32 logits and ids of tokens."""
    id_bits = ids.to(tl.uint32, bitcast=True).to(tl.int64)  # without a sign, so that both halves are registers
    tl.store(listed + at, (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | id_bits, mask=is_listed)


@triton.jit
def read_entries(listed, at, inside):
    """Order keys and ids of tokens, int32; of what is not ``inside`` those of a masked token."""
    entries = tl.load(listed + at, mask=inside, other=_MASKED_ENTRY)
    return order_key((entries >> 32).to(tl.int32).to(tl.float32, bitcast=True)), entries.to(tl.int32)


@triton.jit
def for_mask(condition):
    """A scalar condition, to be part of a mask: Triton 3.9's interpreter spreads a comparison of numbers as numbers."""
    # It costs nothing: a compiler sees that the choice is the condition itself.
    return tl.where(condition, True, False)


@triton.jit
def last_look(logits, inside):
    """Logits at these pointers, -inf where none is ``inside``, for a pass after which the cache need not keep them."""
    return tl.load(logits, mask=inside, other=float("-inf"), eviction_policy="evict_first")


@triton.jit
def order_key(x):
    """``order.order_key``."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x > float("-inf"), tl.where(bits < 0, -(bits & ID_MASK), bits), MASKED_KEY)


@triton.jit
def key_float(key):
    """``order.key_float``; a NaN for keys that no logit has."""
    x = tl.where(key < 0, MASKED_KEY - key, key).to(tl.float32, bitcast=True)
    return tl.where(key == MASKED_KEY, float("-inf"), x)


@triton.jit
def complement(ids):
    """The bits of ids in a packed key, greater for a smaller id; and of these the ids."""
    return 2147483647 - ids  # ID_MASK; as Triton's interpreter takes a constexpr less a tensor for a constexpr


@triton.jit
def pack(key, ids):
    """``order.pack``: int64."""
    return (key.to(tl.int64) << 32) | complement(ids).to(tl.int64)


@triton.jit
def packed_key(packed):
    """``order.packed_key``: int32."""
    return (packed >> 32).to(tl.int32)


@triton.jit
def packed_id(packed):
    """``order.packed_id``, as int32."""
    return complement((packed & ID_MASK).to(tl.int32))


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
    """Pivots (int32) from ``least`` to ``most`` at ``numerator / DENOMINATOR`` of the way."""
    # Logits are spread evenly over floats; if there are outliers such as masks of -1e38, they are over keys.
    # least and most are int32 scalars, or have the shape of numerator; a most below least counts as least.
    width = tl.where(most < least, 0, most - least).to(tl.uint32)  # which wraps at 32 bits, as the sum below
    part = numerator.to(tl.uint32) * (4294967296 // DENOMINATOR)
    key = least + tl.umulhi(width, part).to(tl.int32)
    part = numerator.to(tl.float32) * (1.0 / DENOMINATOR)
    start = key_float(tl.maximum(least, -FLOAT_MAX_KEY))
    end = key_float(tl.minimum(most, FLOAT_MAX_KEY))
    by_value = tl.maximum(tl.minimum(order_key(start * (1.0 - part) + end * part), most), least)
    return tl.where(by_key, key, by_value)


@triton.jit
def unmasked(x, word, ids):
    """Logits of tokens with -inf for those whose bit is 0 in the word that holds it."""
    return tl.where(((word >> (ids & 31)) & 1) != 0, x, float("-inf"))


@triton.jit
def load_logits(row, words, ids, inside, MASKED: tl.constexpr):
    """Logits of tokens that are ``inside``, else -inf; with ``MASKED`` float32, ``unmasked`` by the row's ``words``."""
    x = tl.load(row + ids, mask=inside, other=float("-inf"))
    if MASKED:
        x = unmasked(x.to(tl.float32), tl.load(words + (ids >> 5), mask=inside, other=0), ids)
    return x


@triton.jit
def load_tile_words(words, at, depth, left):
    """The words of a tile with 32 tokens for each ``depth``, from ``at``, a multiple of 32, on."""
    # Tokens behind the first left ones have the logit -inf and any word; left is None for a full tile.
    inside = None if left is None else depth * 32 < left
    return tl.load(words + (at >> 5) + depth, mask=inside)


@triton.jit
def neighbours(values, exists, least, most):
    """The smallest of the values from ``least``, complemented, and the largest up to ``most``: int32 ``[2, LANES]``."""
    # Both are maxima, over lanes and tiles: one reduction of two rows waits once.
    is_largest = tl.arange(0, 2)[:, None, None] == 1
    values, exists = values[None, :, :], exists[None, :, :]
    wanted = exists & tl.where(is_largest, values <= most, values >= least)
    return tl.max(tl.where(wanted, tl.where(is_largest, values, ~values), MASKED_KEY), 1)


@triton.jit
def nearest(near):
    """The smallest and the largest value, int32 scalars, of what ``neighbours`` gives."""
    ends = tl.max(near, 1)
    is_largest = tl.arange(0, 2) == 1
    smallest = ~tl.max(tl.where(is_largest, MASKED_KEY, ends))
    return smallest, tl.max(tl.where(is_largest, ends, MASKED_KEY))
