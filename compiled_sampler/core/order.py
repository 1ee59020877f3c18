"""The total order of a row's tokens as integers: logit descending, then token id ascending.

A float32 becomes an int32 *key* with the same order, in which ``-0.0`` and ``0.0`` are one value; a key and a token id
become one int64 *packed* key. A maximum over packed keys is then the first of the order, however a reduction is split.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MASKED_KEY = -(2**31)
"""Key of a token that cannot be drawn; below the key of every float."""

MASKED_BITS = -1
"""Bits of the score of a token that cannot be drawn (as a float, a NaN); no other score has them."""

POSITIVE_INFINITY_KEY = 0x7F800000
"""Key of ``+inf``; keys above it belong to the race among the ``+inf`` tokens (draw.py)."""

_MAGNITUDE = 0x7FFFFFFF
_SIGN = -(2**31)


class Last(NamedTuple):
    """The last token of a part of the order, as its logit and its id, which compare in a third of the instructions."""

    logit: Tensor
    """float32."""
    token_id: Tensor
    """int32, the same shape."""


def row_logits(logits: Tensor, vocab_size: int) -> Tensor:
    """The first ``vocab_size`` columns as float32, an exact conversion.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        vocab_size: V; columns beyond it are padding and are never read.

    Returns:
        float32 ``[R, V]``.
    """
    return logits[:, :vocab_size].to(torch.float32)


def indices(count: int, device: torch.device) -> Tensor:
    """``0 .. count - 1`` as int32 ``[count]``.

    A conversion rather than an int32 arange: in a kernel that indexes with 64 bits (R * V >= 2**31) Inductor leaves
    such an arange int64, and arithmetic on it does not wrap at 32 bits.
    """
    return torch.arange(count, device=device).to(torch.int32)


def is_visible(x: Tensor) -> Tensor:
    """True where a logit can be drawn: neither ``-inf`` nor NaN, which counts as ``-inf``."""
    return x > float("-inf")


def visible(x: Tensor) -> Tensor:
    """The logits with -inf for a NaN, which says the same and can be compared."""
    return torch.where(is_visible(x), x, float("-inf"))


def magnitude_bits(x: Tensor) -> Tensor:
    """Int32 bits of ``|x|``; above ``POSITIVE_INFINITY_KEY`` exactly for a NaN, whatever its payload."""
    return x.view(torch.int32) & _MAGNITUDE


def float_key(x: Tensor) -> Tensor:
    """Int32 keys ordered as the float32 numbers of ``x`` (no NaN); both zeros have key 0."""
    bits = x.view(torch.int32)
    return torch.where(bits < 0, _SIGN - bits, bits)


def score_order(bits: Tensor) -> Tensor:
    """Int32 keys in the order of scores, from their int32 bits: float32 numbers that are never ``-0.0``.

    ``MASKED_BITS`` gives ``MASKED_KEY``; one operation less than ``float_key``.
    """
    return bits ^ ((bits >> 31) & _MAGNITUDE)


def key_float(key: Tensor) -> Tensor:
    """The float32 that a key stands for, the inverse of ``float_key``; ``MASKED_KEY`` becomes ``-inf``."""
    bits = torch.where(key < 0, _SIGN - key, key)
    return torch.where(key == MASKED_KEY, float("-inf"), bits.view(torch.float32))


def order_key(x: Tensor) -> Tensor:
    """Int32 keys of logits in the order of the contract; ``MASKED_KEY`` for ``-inf`` and NaN."""
    return torch.where(is_visible(x), float_key(x), MASKED_KEY)


def pack(key: Tensor, ids: Tensor) -> Tensor:
    """Int64 keys that are distinct and ordered by (key descending, id ascending).

    Args:
        key: int32, any shape.
        ids: int32 in ``[0, 2**31)``, a shape that broadcasts with ``key``.
    """
    return (key.to(torch.int64) << 32) | (_MAGNITUDE - ids).to(torch.int64)


def last_of(threshold: Tensor) -> Last:
    """The token of a packed key, int64.

    Where many tokens are compared with it in C++, in a stage of its own: else it is unpacked again for each of them.
    """
    return Last(key_float(packed_key(threshold)), packed_id(threshold).to(torch.int32))


def reaches(x: Tensor, ids: Tensor, last: Last) -> Tensor:
    """True where a token stands in the order no later than another; of no use for ``-inf`` and NaN.

    Says what ``pack(order_key(x), ids) >= pack(order_key(last.logit), last.token_id)`` says.

    Args:
        x: float32 ``[R, ...]`` logits.
        ids: int32 token ids, broadcastable to ``x``.
        last: broadcastable to ``x``.
    """
    return (x > last.logit) | ((x == last.logit) & (ids <= last.token_id))


def packed_key(packed: Tensor) -> Tensor:
    """The int32 key inside a packed key."""
    return (packed >> 32).to(torch.int32)


def packed_id(packed: Tensor) -> Tensor:
    """The token id inside a packed key, or in a rank, int64."""
    return _MAGNITUDE - (packed & _MAGNITUDE)


def ranked(keys: Tensor, ids: Tensor, is_above: Tensor) -> Tensor:
    """Tokens of two kinds, one above the other, each in the order of ``pack``: a bit, the key, the id; int64.

    Args:
        keys: int32.
        ids: int32 in ``[0, 2**31)``, a shape that broadcasts with ``keys``.
        is_above: bool, the shape of ``keys``, whether a token is of the kind that stands above.
    """
    key = keys.to(torch.int64) + torch.where(is_above, -_SIGN, _SIGN)
    return (key << 31) | (_MAGNITUDE - ids)


def ranked_key(ranks: Tensor) -> tuple[Tensor, Tensor]:
    """The keys of tokens that were ``ranked``, int64, and their kind, bool; ``packed_id`` gives the ids."""
    is_above = ranks >= 0
    return (ranks >> 31) - torch.where(is_above, -_SIGN, _SIGN), is_above
