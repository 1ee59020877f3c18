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


class Entries(NamedTuple):
    """Where the parameters and the noise of each row come from."""

    table: SlotTable
    """Parameters by slot, ``[S]``."""
    slots: Tensor
    """int64 ``[R]``; -1 for padding, which borrows the parameters of slot 0 and is not live."""
    positions: Tensor
    """int64 ``[R]``, of the token that is drawn."""
    offsets: Tensor | None = None
    """int64 ``[R]``, the place of the token in its block of drafts; None outside of one."""


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
    """int32 ``[R, B]``, the ``nan_bits`` of a block."""
    token_ids: Tensor | None = None
    """int32 ``[R, B]``, the first token with that key, or its rank in a race; None where blocks do not name theirs."""


class Trials(NamedTuple):
    """What is known of each draft before its test, in the order of the proposals; then of no draft."""

    row_ids: Tensor
    """int64 ``[D]``, the row that judges it."""
    slots: Tensor
    """int64 ``[D]``, the slot of that row; -1 for padding."""
    positions: Tensor
    """int64 ``[D]``, the position of the token that it predicts."""
    offsets: Tensor
    """int64 ``[D]``, rows of the same request before it."""
    drafts: Tensor
    """int64 ``[D]``, the draft; -1 where it is no token id."""


class Layout(NamedTuple):
    """Which row belongs to which request, when requests have different numbers of rows."""

    slots: Tensor
    """int64 ``[R]``, the slot of each row; -1 for padding."""
    positions: Tensor
    """int64 ``[R]``, the position of the token that a row predicts."""
    offsets: Tensor
    """int64 ``[R]``, rows of the same request before this one."""
    drafts: Tensor
    """int64 ``[R]``, the draft that a row judges; -1 where there is none or it is no token id."""
    proposals: Tensor
    """int64 ``[R]``, the row of the proposals that a row's draft was drawn from."""
    trials: Trials
    """``row_layout`` makes ``[R]``, more than there are drafts; the pipeline cuts what is beyond."""
    first_rows: Tensor
    """int64 ``[N]``, the first row of each request."""
    first_drafts: Tensor
    """int64 ``[N]``, the first draft of each request, in the order of the proposals."""
    num_drafts: Tensor
    """int64 ``[N]``."""


class Cut(NamedTuple):
    """The tokens that pass the filters of a row, as one threshold, and the units of their weights."""

    row_max: Tensor
    """float32 ``[R]``, the largest logit."""
    scale: Tensor
    """float32 ``[R]``."""
    min_p_log2: Tensor | None
    """float32 ``[R]``; None where the mode applies no min_p."""
    threshold: Tensor | None
    """int64 ``[R]``, the last packed key that top-k and top-p keep; None where the mode applies neither."""
    only: Tensor | None
    """int64 ``[R]``, without a threshold: the one token of a greedy row, -1 for other rows."""


class Law(NamedTuple):
    """The distribution of each row in integers: a token's probability is its weight over the total."""

    cut: Cut | None
    """How weights follow from logits; None where the row holds probabilities."""
    total: Tensor
    """int64 ``[R]``, the sum of the weights."""
    inverse: Tensor
    """float64 ``[R]``, ``1 / total``; 0 for a total of 0."""
    status: Tensor
    """int32 ``[R]``, ``RowStatus`` flags that the logits alone decide."""


class LawBlocks(NamedTuple):
    """A law whose sums are not taken yet: ``law.summed`` takes them."""

    cut: Cut | None
    """As in ``Law``."""
    weights: Tensor
    """int64 ``[R, B]``, of parts of each row."""
    magnitudes: Tensor | None
    """int32 ``[R, ...]``, the ``nan_bits`` of parts of each row; None where nobody asks for the status."""


class WholeLaw(NamedTuple):
    """The law of rows that top-k and top-p leave whole, before what ``law.summed`` does: their cut and their sums."""

    blocks: BlockMaxima
    """The ``order_maxima`` ``[R, B]``, with token ids."""
    entries: Entries
    """``[R]``."""
    weights: Tensor
    """int64 ``[R, B]``, of the blocks."""


AnyLaw = Law | LawBlocks | WholeLaw


class Proposal(NamedTuple):
    """What drafts were drawn from, a row a draft; two None for one-hot drafts."""

    values: Tensor | None
    """Logits or probabilities ``[D, >=V]``."""
    law: AnyLaw | None
    """Their law ``[D]``."""


class Judged(NamedTuple):
    """What is known of each draft, and the laws that say so."""

    accepted: Tensor
    """bool ``[D]``, the draft passes the test of its own position."""
    ratio: Tensor | None
    """float64 ``[D]``, ``p / q`` of the draft, 0 where there is none; None where the rule does not ask."""
    is_proposed: Tensor
    """bool ``[D]``, whether the proposals give the draft any weight."""
    law: Law
    """Of the target ``[R]``, or ``[D]`` where only drafts have one."""
    proposed: Law | None
    """Of the proposals ``[D]``; None for one-hot drafts."""


class Final(NamedTuple):
    """The one row of each request that is drawn from: the first rejected draft's, or the one after all drafts."""

    row_ids: Tensor
    """int64 ``[N]``, the row."""
    num_accepted: Tensor
    """int64 ``[N]``, drafts of the request before it."""
    num_matching: Tensor
    """int64 ``[N]``, see ``VerifyOutputs``."""
    drafts: Tensor
    """int64 ``[N]``, the rejected draft; -1 where nothing was rejected."""
    proposals: Tensor
    """int64 ``[N]``, the row of the proposals that it was drawn from."""
    rows: Rows
    """Parameters ``[N]``, with the noise of a residual where a draft that the proposals hold was rejected, else of the
    target's own draw."""
    law: Law
    """Of the target ``[N]``."""
    proposed: Law | None
    """Of the rejected draft ``[N]``; None for one-hot drafts."""
    carry: Tensor | None
    """float64 ``[N]``, see ``verification.carried_ratio``; None for 1."""
    status: Tensor
    """int64 ``[N]``, ``RowStatus`` flags that are known before the last token is drawn."""


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
