"""What the kernels of a search leave for each other, and how a kernel is declared.

A row has a record of each: its brackets, its sums, and its list, the logits and the ids of the tokens that the pass
over the row found worth a look. An entry of the list is an int64, the bits of the logit above the id: one store, at one
address.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from compiled_sampler.exact.triton import SPARE as SPARE_ENTRIES
from compiled_sampler.exact.triton.keys import order_key

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
