"""The total order of a row's tokens as integers: logit descending, then token id ascending.

A float32 becomes an int32 *key* with the same order, in which ``-0.0`` and ``0.0`` are one value; a key and a token id
become one int64 *packed* key. The maximum of packed keys is then the first token of the order, however a reduction is
split.

Denormals stand in the order like other numbers. A CPU's float operations take them for zeros or not, as a mode of each
thread says (``torch.set_flush_denormal``), so only integer operations may put tokens in order there. A GPU's operations
keep them in every mode.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MASKED_KEY = -(2**31)  # key of a token that cannot be drawn; it is below the key of every float

MASKED_BITS = -1  # score bits of a token that cannot be drawn (a NaN as a float); no other score has these bits

POSITIVE_INFINITY_KEY = 0x7F800000
"""Key of ``+inf``; keys above it belong to the race among the ``+inf`` tokens (``score.raced_bits``)."""

LEAST_NORMAL_KEY = 0x00800000
"""Key of the least normal float32, 2**-126; minus this, of the largest negative one. Keys between are of denormals."""

_MAGNITUDE = 0x7FFFFFFF
_SIGN = -(2**31)


class Last(NamedTuple):
    """The last token of a prefix of the order, by its logit or by its key.

    Logits compare in a third of a key's instructions, keys also where float operations may take denormals for zeros.
    """

    value: Tensor  # float32 logits or int32 order keys
    token_id: Tensor  # int32, the same shape


def row_logits(logits: Tensor, vocab_size: int) -> Tensor:
    """The first ``vocab_size`` columns as float32 ``[R, V]``, an exact conversion."""
    return logits[:, :vocab_size].to(torch.float32)


def indices(count: int, device: torch.device) -> Tensor:
    """``0 .. count - 1`` as int32 ``[count]``."""
    # An int64 arange is converted, because in a kernel that indexes with 64 bits (R * V >= 2**31) Inductor leaves an
    # int32 arange as int64, and arithmetic on it does not wrap at 32 bits.
    return torch.arange(count, device=device).to(torch.int32)


def is_visible(x: Tensor) -> Tensor:
    """Mask of the logits that can be drawn: neither ``-inf`` nor NaN, which counts as ``-inf``."""
    return x > float("-inf")


def visible(x: Tensor) -> Tensor:
    """The logits with every NaN replaced by ``-inf``, which means the same and can be compared."""
    return torch.where(is_visible(x), x, float("-inf"))


def magnitude_bits(x: Tensor) -> Tensor:
    """Int32 bits of ``|x|``, above ``POSITIVE_INFINITY_KEY`` exactly if ``x`` is a NaN, whatever its payload."""
    return x.view(torch.int32) & _MAGNITUDE


def without_denormals(x: Tensor) -> Tensor:
    """The numbers, float32, with ``+0.0`` for denormals and zeros: by integers, so in every denormal mode."""
    return torch.where(magnitude_bits(x) < LEAST_NORMAL_KEY, 0.0, x)


def float_key(x: Tensor) -> Tensor:
    """Int32 keys in the order of the float32 numbers ``x``, none of which may be NaN; both zeros have key 0."""
    bits = x.view(torch.int32)
    return torch.where(bits < 0, _SIGN - bits, bits)


def score_order(bits: Tensor) -> Tensor:
    """Int32 keys in the order of scores, from the int32 bits of scores: float32 numbers that are never ``-0.0``."""
    # MASKED_BITS becomes MASKED_KEY. One operation less than float_key.
    return bits ^ ((bits >> 31) & _MAGNITUDE)


def logit_bits(x: Tensor) -> Tensor:
    """Int32 bits of logits as scores, compared by ``score_order``: those of ``x``, of ``+0.0`` for both zeros."""
    bits = x.view(torch.int32)
    return torch.where(bits == _SIGN, 0, bits)


def key_float(key: Tensor) -> Tensor:
    """The float32 number of a key, the inverse of ``float_key``; ``MASKED_KEY`` becomes ``-inf``."""
    bits = torch.where(key < 0, _SIGN - key, key)
    return torch.where(key == MASKED_KEY, float("-inf"), bits.view(torch.float32))


def order_key(x: Tensor) -> Tensor:
    """Int32 keys of logits, larger for larger logits; ``MASKED_KEY`` for ``-inf`` and NaN."""
    return torch.where(is_visible(x), float_key(x), MASKED_KEY)


def pack(key: Tensor, ids: Tensor) -> Tensor:
    """Int64 packed keys, distinct and ordered by (key descending, id ascending): the first of the order is largest."""
    return (key.to(torch.int64) << 32) | (_MAGNITUDE - ids).to(torch.int64)


def last_of(threshold: Tensor, *, by_key: bool) -> Last:
    """The token with packed key ``threshold``, int64, by its key or by its logit."""
    # Where C++ compares many tokens with it, this must be a stage of its own: otherwise it is unpacked for every token.
    key = packed_key(threshold)
    return Last(key if by_key else key_float(key), packed_id(threshold).to(torch.int32))


def reaches(x: Tensor, ids: Tensor, last: Last) -> Tensor:
    """Mask of the tokens that stand no later in the order than ``last``; undefined for ``-inf`` and NaN."""
    # Equal to pack(order_key(x), ids) >= threshold for the threshold of last_of.
    if last.value.is_floating_point():
        return (x > last.value) | ((x == last.value) & (ids <= last.token_id))
    return order_key(x) >= last.value + (ids > last.token_id).to(torch.int32)  # g++ vectorises it, not the other form


def packed_key(packed: Tensor) -> Tensor:
    """The int32 key inside a packed key."""
    return (packed >> 32).to(torch.int32)


def packed_id(packed: Tensor) -> Tensor:
    """The token id, int64, inside a packed key or inside a rank of ``ranked``."""
    return _MAGNITUDE - (packed & _MAGNITUDE)


def ranked(keys: Tensor, ids: Tensor, is_above: Tensor) -> Tensor:
    """Int64 ranks of tokens of two kinds: tokens with ``is_above`` come first, each kind in the order of ``pack``."""
    # A rank holds, from the highest bit down, the kind, the key and the id.
    key = keys.to(torch.int64) + torch.where(is_above, -_SIGN, _SIGN)
    return (key << 31) | (_MAGNITUDE - ids)


def ranked_key(ranks: Tensor) -> tuple[Tensor, Tensor]:
    """The keys, int64, and the kinds, bool, inside the ranks of ``ranked``; ``packed_id`` gives the ids."""
    is_above = ranks >= 0
    return (ranks >> 31) - torch.where(is_above, -_SIGN, _SIGN), is_above
