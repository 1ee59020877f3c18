"""The inputs and outputs of a step: named tuples of tensors; each field's docstring gives dtype, shape and unit."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_sampler.edits.min_tokens import StopLists
from compiled_sampler.edits.tables import EditInputs, NoiseInputs
from compiled_sampler.logprobs import LogprobInputs, LogprobOutputs


class RowStatus(enum.IntFlag):
    """Flags of what happened in a row besides a plain draw, which is 0. Padding has status -1, like its token."""

    NAN_SEEN = 1
    """A logit was NaN; it counted as ``-inf``. A NaN that a mask hides is not reported."""
    ALL_MASKED = 2
    """No token could be drawn; the token is -1."""
    POSITIVE_INFINITY = 4
    """A logit was ``+inf``, or its scaled value overflowed; the token is one of these, the lowest id if greedy."""
    ZERO_RESIDUAL = 8
    """A draft was rejected, yet no token has a residual; the target is drawn from (speculation/residual.py)."""
    DRAFT_OUT_OF_RANGE = 16
    """A draft was not a token id; it was rejected, and no logit or probability was read for it."""
    DRAFT_IMPOSSIBLE = 32
    """A draft has no weight in the law that it is said to be drawn from; it was rejected, under rejection and block."""
    HISTORY_EXCEEDED = 64
    """The position is beyond ``history_len``: edits of the row read only the tokens of the positions below it."""
    PARAMETER_OUT_OF_RANGE = 128
    """A parameter that lay on the device was out of range; the token is -1 (``compiled_sampler.functional``)."""
    NOT_COVERED = 256
    """The request has a parameter that the step's mode does not cover, or an edit that the step does not run, since its
    slot came with the step (``Plan.slot_ids``). The token is -1, nothing is recorded, and no other flag is set."""
    PARENT_OUT_OF_RANGE = 512
    """The parent of a node of a tree of drafts is no earlier node; it and what follows it count as rejected."""


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
    needs: Tensor
    """int64 ``[S]``, a bit for each mode that does not cover the request, and for each of its edits."""
    unserved: Tensor
    """int64 ``[1]``, of these the bits that the step does not serve; a row that has one of them is not covered."""


class RowEntries(NamedTuple):
    """The entries of a ``SlotTable`` for the rows of one call: row r is slot r, and another call may have more."""

    seeds: Tensor
    """int64 ``[R]``, units as in ``SlotTable``."""
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


AnyTable = SlotTable | RowEntries


class DraftTable(NamedTuple):
    """The logits that drafts were drawn from, by slot and place; like a slot table of one size for every batch."""

    logits: Tensor
    """``[S + 1, K, V]`` of the dtype of the logits: draft j of slot s at ``[s, j]``; slot S belongs to padding."""


class PickedRows(NamedTuple):
    """Some rows of logits where they stand, for a pass that copies rows anyway: it stands for a copy of them."""

    values: Tensor
    """float32, bfloat16 or float16 ``[R, >=V]``."""
    row_ids: Tensor
    """int64 ``[n]``, in ``[0, R)``; a row may be picked more than once."""


class RequestRows(NamedTuple):
    """Where the rows of some requests of a batch stand; behind those of the last one stand any rows."""

    row_ids: Tensor
    """int64 ``[n]``, of the logits, one row after the other."""
    proposal_ids: Tensor | None
    """int64 ``[d]``, of the proposals; None where none are read by row."""


class SampleInputs(NamedTuple):
    """The inputs of one sampling step."""

    logits: Tensor
    """float32, bfloat16 or float16 ``[R, >=V]``."""
    slots: Tensor
    """int64 ``[R]``, the slot of each row's request; -1 for padding."""
    positions: Tensor
    """int64 ``[R]``, >= 0, the position of the token to draw."""
    table: AnyTable
    """Parameters by slot, ``[S]``."""
    offsets: Tensor | None = None
    """int64 ``[R]``, each draft's offset in its block of drafts, for drafts with noise of their own; else None."""
    edits: EditInputs | None = None
    """What edits of the logits read; None in a batch that has none."""
    stops: StopLists | None = None
    """Tokens that end a request, by slot; None in a batch that has none."""
    logprobs: LogprobInputs | None = None
    """Which logprobs are returned, and what they read; None for none."""
    noise: NoiseInputs | None = None
    """What keys the noise of requests with a watermark; None in a batch that has none."""
    draw_index: Tensor | None = None
    """int64 ``[R]``, which of several draws of its position each row is; None for 0."""


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
    proposals: Tensor | DraftTable | None
    """Probabilities or logits ``[D, >=V]`` that drafts were drawn from, one row per draft; the table that holds such
    logits if ``Mode.drafts`` is ``CACHE``; None for one-hot drafts."""
    table: AnyTable
    """Parameters by slot, ``[S]``."""
    edits: EditInputs | None = None
    """What edits of the logits of target and drafts read, its mask of the target's rows ``[R]``; None for none."""
    stops: StopLists | None = None
    """Tokens that end a request, by slot; None in a batch that has none."""
    logprobs: LogprobInputs | None = None
    """Which logprobs are returned, its ids for each row ``[R]``, and what they read; None for none."""
    noise: NoiseInputs | None = None
    """What keys the noise of requests with a watermark; None in a batch that has none."""
    draft_table: SlotTable | None = None
    """``[S]``, what the logits of drafts are filtered with if ``Mode.drafts`` is ``PROCESSED``, else not read."""
    rows: RequestRows | None = None
    """Which rows of the logits, and of proposals that are logits to edit, are the requests', in a chunk of a batch; all
    other tensors by row are of these rows alone. None for a whole batch."""
    parents: Tensor | None = None
    """int64 ``[N, K]``, the earlier draft that each one follows, -1 for none; None for drafts that follow one another.
    Other numbers are no error of the step, and entries beyond ``num_drafts`` are not read."""


class VerifyOutputs(NamedTuple):
    """The outputs of a verification step; every field is -1 for padding.

    As a caller's ``out``, each int64 field may be int32 too, at the cost that ``SampleOutputs`` names, once for all.
    """

    token_ids: Tensor
    """int64 ``[N, K+1]``, the accepted drafts, then one more token, or -1 if its row is all masked; the tail is -1."""
    num_emitted: Tensor
    """int64 ``[N]``, 0..K+1, the number of tokens to commit; 0 only where the first row is all masked, or for a request
    that is not covered."""
    num_accepted: Tensor
    """int64 ``[N]``, the drafts among them: ``num_emitted - 1``, or ``num_emitted`` before a row that is all masked,
    and where an accepted draft ends the request."""
    num_matching: Tensor
    """int64 ``[N]``, drafts that pass the test of their own position, also past the first rejection: telemetry only."""
    status: Tensor
    """int32 ``[N]``, the ``RowStatus`` flags of the rows whose tokens are emitted."""
    finished: Tensor | None = None
    """bool ``[N]``, whether the last token that is emitted, or a row that is all masked, ends the request; None in a
    batch without edits. Behind such a token nothing is emitted."""
    node_ids: Tensor | None = None
    """int64 ``[N, K]``, which draft of a tree each of the accepted ones is, -1 behind the last; None without trees."""
    logprobs: LogprobOutputs | None = None
    """The logprobs of the emitted tokens, ``[N, K+1, ...]`` a field; None in a call that asks for none."""

    @property
    def accepted(self) -> Tensor:
        """Bool ``[N, K]``, true for the drafts that were accepted: under every rule the first ``num_accepted`` of each.

        All false for padding. False at a draft that was rejected or is no token id, and at all places behind it. It is
        computed at each use, on the device and without a wait. A comparison of ``token_ids`` with the drafts is not the
        same: the token that takes a rejected draft's place may have its id (``DRAFT_IMPOSSIBLE``, ``ZERO_RESIDUAL``).
        """
        places = torch.arange(self.token_ids.shape[1] - 1, device=self.token_ids.device)
        return places < self.num_accepted[:, None]

    def tolist(self) -> list[list[int]]:
        """The tokens to commit of each request, ``num_emitted`` of them, as N lists; this waits for the device.

        A row is cut at its first -1. So the list is empty for padding, for a request whose first row is all masked, and
        for one that is not covered: ``status``, -1 for padding, tells them apart.
        """
        return [row[: row.index(-1)] if -1 in row else row for row in self.token_ids.tolist()]


class ProbabilityOutputs(NamedTuple):
    """The output of a probability step."""

    probabilities: Tensor
    """float32 ``[R, V]``; all 0 for padding, for rows in which every token is masked, and where not covered."""


class SampleOutputs(NamedTuple):
    """The outputs of a sampling step, also of the draws inside a verification.

    As a caller's ``out``, ``token_ids`` may be int32 too. The copy that brings the results there converts them: one
    launch more than for int64, and none where a captured variant writes an ``out`` that is bound (``Sampler.bind``).
    """

    token_ids: Tensor
    """int64 ``[R]``, in ``[0, V)``; -1 for padding, for rows in which every token is masked, and where not covered."""
    status: Tensor
    """int32 ``[R]``, ``RowStatus`` flags; -1 for padding."""
    finished: Tensor | None = None
    """bool ``[R]``, whether the token, or a row that is all masked, ends the request; None in a batch without
    edits."""
    logprobs: LogprobOutputs | None = None
    """The logprobs of the tokens, ``[R, ...]`` a field; None in a call that asks for none."""

    def tolist(self) -> list[int]:
        """The token of each row, R ints, -1 as in ``token_ids``. This waits for the device."""
        tokens: list[int] = self.token_ids.tolist()
        return tokens


class EditedOutputs(NamedTuple):
    """The output of a step that edits logits and draws nothing."""

    logits: Tensor
    """float32 ``[R, V]``."""


def tensors_of(results: tuple[Any, ...]) -> list[Tensor]:
    """The tensors of the results of a step in their order, those of logprobs last, without fields that are None."""
    nested = (field if isinstance(field, tuple) else (field,) for field in results)
    return [field for fields in nested for field in fields if field is not None]
