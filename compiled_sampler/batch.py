"""What travels through the stages: plain tuples of tensors, one field a tensor, one shape a field."""

from __future__ import annotations

import enum
from typing import NamedTuple

from torch import Tensor


class RowStatus(enum.IntFlag):
    """What happened in a row besides a draw; 0 is a plain draw. A padding row's status is -1, like its token."""

    NAN_SEEN = 1
    """A logit was NaN; it counted as ``-inf``."""
    ALL_MASKED = 2
    """No token could be drawn; the token is -1."""
    POSITIVE_INFINITY = 4
    """A logit was ``+inf`` (or its scaled value overflowed); the race was among those tokens."""


class SlotTable(NamedTuple):
    """The parameters of every request, one entry a slot, in the units that the stages use."""

    seeds: Tensor
    """int64 ``[S]``, modulo 2**64 as a two's complement number."""
    scale: Tensor
    """float32 ``[S]``, ``log2(e) / temperature``; 1 for greedy requests."""
    noise_mask: Tensor
    """int32 ``[S]``, 0 for greedy requests, else -1: the bits of the noise that count."""
    top_k: Tensor
    """int64 ``[S]``, 1..V; V keeps every token."""
    top_p: Tensor
    """float64 ``[S]``, in (0, 1]; 1 keeps every token."""
    min_p_log2: Tensor
    """float32 ``[S]``, ``log2(min_p)``; -inf keeps every token."""


class SampleInputs(NamedTuple):
    """All that one sampling step reads."""

    logits: Tensor
    """float32, bfloat16 or float16 ``[R, >=V]``."""
    slots: Tensor
    """int64 ``[R]``, the slot of each row's request; -1 for padding."""
    positions: Tensor
    """int64 ``[R]``, >= 0, the position of the token that is drawn."""
    table: SlotTable
    """Parameters by slot, ``[S]``."""


class NoiseKeys(NamedTuple):
    """The four 32-bit keys of a row's noise, int32, each ``[R]`` or broadcastable to token ids; the first is odd."""

    first: Tensor
    second: Tensor
    third: Tensor
    fourth: Tensor


class Rows(NamedTuple):
    """The parameters of each row, gathered from its slot."""

    live: Tensor
    """bool ``[R]``, false for padding."""
    keys: NoiseKeys
    """int32 ``[R]`` each."""
    scale: Tensor
    """float32 ``[R]``."""
    noise_mask: Tensor
    """int32 ``[R]``."""
    top_k: Tensor
    """int64 ``[R]``."""
    top_p: Tensor
    """float64 ``[R]``."""
    min_p_log2: Tensor
    """float32 ``[R]``."""


class BlockMaxima(NamedTuple):
    """The best token of each block of a row, and what shows a NaN in it."""

    keys: Tensor
    """int32 ``[R, B]``, the largest key of a block."""
    magnitudes: Tensor
    """int32 ``[R, B]``, the largest ``magnitude_bits`` of a block."""


class SampleOutputs(NamedTuple):
    """What a sampling step returns."""

    token_ids: Tensor
    """int64 ``[R]``, in ``[0, V)``; -1 for padding and where every token is masked."""
    status: Tensor
    """int32 ``[R]``, ``RowStatus`` flags; -1 for padding."""
