"""The inputs and outputs of a step: named tuples of tensors; each field's docstring gives dtype, shape and unit."""

from __future__ import annotations

import enum
from typing import NamedTuple

from torch import Tensor


class RowStatus(enum.IntFlag):
    """Flags of what happened in a row besides a plain draw, which is 0. Padding has status -1, like its token."""

    NAN_SEEN = 1
    """A logit was NaN; it counted as ``-inf``."""
    ALL_MASKED = 2
    """No token could be drawn; the token is -1."""
    POSITIVE_INFINITY = 4
    """A logit was ``+inf``, or its scaled value overflowed; the token was drawn among the ``+inf`` tokens."""
    ZERO_RESIDUAL = 8
    """A draft was rejected, yet no token has a residual; the target is drawn from (speculation/residual.py)."""
    DRAFT_OUT_OF_RANGE = 16
    """A draft was not a token id; it was rejected, and no logit or probability was read for it."""
    DRAFT_IMPOSSIBLE = 32
    """A draft has no weight in the law that it is said to be drawn from; it was rejected, under rejection and block."""


class SlotTable(NamedTuple):
    """The parameters of every request, one entry per slot, in the units that the stages compute with."""

    seeds: Tensor
    """int64 ``[S]``, the seed modulo 2**64 as a two's complement number."""
    scale: Tensor
    """float32 ``[S]``, ``log2(e) / temperature``; 1 for greedy requests."""
    noise_mask: Tensor
    """int32 ``[S]``, a mask on the bits of the noise: 0 for greedy requests, which draw without noise, else -1."""
    top_k: Tensor
    """int64 ``[S]``, 1..V; V keeps every token."""
    top_p: Tensor
    """float64 ``[S]``, in (0, 1]; 1 keeps every token."""
    min_p_log2: Tensor
    """float32 ``[S]``, ``log2(min_p)``; -inf keeps every token."""


class SampleInputs(NamedTuple):
    """The inputs of one sampling step."""

    logits: Tensor
    """float32, bfloat16 or float16 ``[R, >=V]``."""
    slots: Tensor
    """int64 ``[R]``, the slot of each row's request; -1 for padding."""
    positions: Tensor
    """int64 ``[R]``, >= 0, the position of the token to draw."""
    table: SlotTable
    """Parameters by slot, ``[S]``."""
    offsets: Tensor | None = None
    """int64 ``[R]``, each draft's offset in its block of drafts, for drafts with noise of their own; else None."""


class VerifyInputs(NamedTuple):
    """The inputs of one verification step; request n has ``num_drafts[n] + 1`` consecutive rows of logits."""

    logits: Tensor
    """float32, bfloat16 or float16 ``[R, >=V]``; float32 probabilities ``[R, >=V]`` if ``Mode.from_probabilities``."""
    slots: Tensor
    """int64 ``[N]``, the slot of each request; -1 for padding."""
    positions: Tensor
    """int64 ``[N]``, >= 0, the position of the first token to draw."""
    num_drafts: Tensor
    """int64 ``[N]``, 0..K; -1 for padding without rows."""
    draft_token_ids: Tensor
    """int64 ``[N, K]``; entries beyond ``num_drafts`` are not read."""
    proposals: Tensor | None
    """Probabilities or logits ``[D, >=V]`` that drafts were drawn from, one row per draft; None for one-hot drafts."""
    table: SlotTable
    """Parameters by slot, ``[S]``."""


class VerifyOutputs(NamedTuple):
    """The outputs of a verification step; every field is -1 for padding."""

    token_ids: Tensor
    """int64 ``[N, K+1]``, the accepted drafts, then one more token, or -1 if its row is all masked; the tail is -1."""
    num_emitted: Tensor
    """int64 ``[N]``, 0..K+1, the number of tokens to commit; 0 only where the first row is all masked."""
    num_accepted: Tensor
    """int64 ``[N]``, the drafts among them: ``num_emitted - 1``, or ``num_emitted`` before a row that is all masked."""
    num_matching: Tensor
    """int64 ``[N]``, drafts that pass the test of their own position, also past the first rejection: telemetry only."""
    status: Tensor
    """int32 ``[N]``, the ``RowStatus`` flags of the rows whose tokens are emitted."""


class ProbabilityOutputs(NamedTuple):
    """The output of a probability step."""

    probabilities: Tensor
    """float32 ``[R, V]``; all 0 for padding and for rows in which every token is masked."""


class SampleOutputs(NamedTuple):
    """The outputs of a sampling step, also of the draws inside a verification."""

    token_ids: Tensor
    """int64 ``[R]``, in ``[0, V)``; -1 for padding and for rows in which every token is masked."""
    status: Tensor
    """int32 ``[R]``, ``RowStatus`` flags; -1 for padding."""
