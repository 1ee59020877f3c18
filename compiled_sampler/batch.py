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
    ZERO_RESIDUAL = 8
    """A draft was rejected where nothing is left of the residual; the token is drawn from the target (residual.py)."""
    DRAFT_OUT_OF_RANGE = 16
    """A draft was no token id; it was rejected, and nothing was read for it."""


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
    offsets: Tensor | None = None
    """int64 ``[R]``, for drafts with noise of their own: the place of each in its block of drafts; else None."""


class VerifyInputs(NamedTuple):
    """All that one verification step reads; request n has ``num_drafts[n] + 1`` consecutive rows of logits."""

    logits: Tensor
    """float32, bfloat16 or float16 ``[R, >=V]``, or probabilities float32 ``[R, >=V]`` where the mode says so."""
    slots: Tensor
    """int64 ``[N]``, the slot of each request; -1 for padding."""
    positions: Tensor
    """int64 ``[N]``, >= 0, the position of the first token that may be drawn."""
    num_drafts: Tensor
    """int64 ``[N]``, 0..K; -1 for padding without rows."""
    draft_token_ids: Tensor
    """int64 ``[N, K]``; what lies beyond a request's drafts is not read."""
    proposals: Tensor | None
    """What the drafts were drawn from, a row a draft: probabilities or logits ``[D, >=V]``; None for one-hot drafts."""
    table: SlotTable
    """Parameters by slot, ``[S]``."""


class VerifyOutputs(NamedTuple):
    """What a verification step returns; padding is -1 everywhere."""

    token_ids: Tensor
    """int64 ``[N, K+1]``, accepted drafts and one token more; the tail is -1."""
    num_emitted: Tensor
    """int64 ``[N]``, 1..K+1: how many tokens to commit."""
    num_accepted: Tensor
    """int64 ``[N]``, ``num_emitted - 1``."""
    num_matching: Tensor
    """int64 ``[N]``, drafts that pass the test of their own position, also beyond the first rejection: telemetry."""
    status: Tensor
    """int32 ``[N]``, ``RowStatus`` flags of the rows whose tokens are emitted."""


class ProbabilityOutputs(NamedTuple):
    """What a probability step returns."""

    probabilities: Tensor
    """float32 ``[R, V]``; rows that are padding or wholly masked are 0."""


class SampleOutputs(NamedTuple):
    """What a sampling step returns."""

    token_ids: Tensor
    """int64 ``[R]``, in ``[0, V)``; -1 for padding and where every token is masked."""
    status: Tensor
    """int32 ``[R]``, ``RowStatus`` flags; -1 for padding."""
