"""The list of a row on CUDA: the logits and the ids of the tokens that the pass over the row found worth a look.

An entry is an int64, the bits of the logit above the id: one store, at one address.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.exact.triton.keys import order_key

SPARE = tl.constexpr(256)
"""Entries after a full list: a program that finds it full writes there what it has, at most so much."""

_NO_ENTRY = tl.constexpr(-36028797018963968)  # a masked token


@triton.jit
def list_of(lists, index, CAPACITY: tl.constexpr):
    """Where the list of a row begins."""
    return lists + index.to(tl.int64) * (CAPACITY + SPARE)


@triton.jit
def write_entries(listed, at, x, ids, is_listed):
    """Write float32 logits and ids of tokens."""
    id_bits = ids.to(tl.uint32, bitcast=True).to(tl.int64)  # without a sign, so that both halves are registers
    tl.store(listed + at, (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | id_bits, mask=is_listed)


@triton.jit
def read_entries(listed, at, inside):
    """Order keys and ids of tokens, int32; of what is not ``inside`` those of a masked token."""
    entries = tl.load(listed + at, mask=inside, other=_NO_ENTRY)
    return order_key((entries >> 32).to(tl.int32).to(tl.float32, bitcast=True)), entries.to(tl.int32)
