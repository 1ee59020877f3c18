"""A slot table of one entry a row, made from parameters that lie on the device; what is out of range draws no token."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import RowEntries, RowStatus, SampleOutputs, VerifyOutputs
from compiled_sampler.core.arithmetic import LOG2_E, bits_of, log2_of_tensor
from compiled_sampler.params import MAX_TEMPERATURE, MIN_TEMPERATURE

_SIGN, _ONE = bits_of(-0.0), bits_of(1.0)
_COLDEST, _HOTTEST = bits_of(MIN_TEMPERATURE), bits_of(MAX_TEMPERATURE)
_OUT_OF_RANGE, _UNCOVERED = -1, -2  # slots of rows that are padding to the pipeline


class RowInputs(NamedTuple):
    """The parameters of each row, as a caller names them."""

    temperature: Tensor  # float64 ``[R]``, 0 or in [1e-5, 1e30]
    top_k: Tensor  # int64 ``[R]``, >= 0; 0 keeps every token
    top_p: Tensor  # float64 ``[R]``, in (0, 1]
    min_p: Tensor  # float64 ``[R]``, in [0, 1]
    seeds: Tensor  # int64 ``[R]``, any
    positions: Tensor  # int64 ``[R]``, >= 0


class RowTable(NamedTuple):
    """The parameters of each row as the pipeline reads them."""

    table: RowEntries
    """``[R]``; rows out of range hold an entry that filters nothing."""
    slots: Tensor
    """int64 ``[R]``, the number of the row; of rows that are padding to the pipeline -1 if they are out of range, -2 if
    the mode does not cover them."""


class Requests(NamedTuple):
    """Which requests of a verification have rows."""

    slots: Tensor
    """int64 ``[N]``; -1 for padding and for requests out of range, -2 for those that the mode does not cover."""
    num_drafts: Tensor
    """int64 ``[N]``, 0..K; -1 for padding without rows."""
    flags: Tensor
    """int32 ``[N]``, ``PARAMETER_OUT_OF_RANGE`` or ``NOT_COVERED`` of requests that emit nothing, else 0."""


def row_table(
    inputs: RowInputs,
    *,
    vocab_size: int,
    draws: bool,
    filters_min_p: bool,
    capacity: int,
    beyond_candidates: bool,
) -> RowTable:
    """The slot table of rows, the entries of ``slots.slot_values``; arguments behind the first are of the mode."""
    # Numbers are compared by their bits, so that denormals mean the same whatever a thread does with them.
    temperature, top_k, top_p, min_p, seeds, positions = inputs
    heat, share, least = (x.view(torch.int64) for x in (temperature, top_p, min_p))
    is_zero, min_p_off = (heat == 0) | (heat == _SIGN), (least == 0) | (least == _SIGN)
    in_range = (is_zero | ((heat >= _COLDEST) & (heat <= _HOTTEST))) & (top_k >= 0) & (positions >= 0)
    in_range = in_range & (share > 0) & (share <= _ONE) & (min_p_off | ((least > 0) & (least <= _ONE)))
    greedy, keeps_all_k = is_zero | (top_k == 1), (top_k == 0) | (top_k >= vocab_size)
    covers_row = beyond_candidates or capacity >= vocab_size
    covered = _prefix_is_covered(top_k, keeps_all_k, share == _ONE, capacity=capacity, covers_row=covers_row)
    covered = greedy | (covered & (min_p_off | filters_min_p) & draws)
    valid = in_range & covered
    plain, cuts = valid & ~greedy, valid & ~greedy & ~min_p_off
    logarithm = log2_of_tensor(torch.where(cuts, min_p, 1.0))
    one = torch.where(plain, temperature, 1.0)
    table = RowEntries(
        seeds=torch.where(valid, seeds, 0),
        scale=torch.where(greedy & valid, 1.0, (torch.full_like(one, LOG2_E) / one).to(torch.float32)),
        noise_mask=torch.where(greedy & valid, 0, -1).to(torch.int32),
        top_k=torch.where(greedy & valid, 1, torch.where(plain & ~keeps_all_k, top_k, vocab_size)),
        top_p=torch.where(plain, top_p, 1.0),
        min_p_log2=torch.where(cuts, logarithm.to(torch.float32), -math.inf),
    )
    slots = torch.where(in_range, _UNCOVERED, _OUT_OF_RANGE)
    return RowTable(table, torch.where(valid, torch.arange(seeds.shape[0], device=seeds.device), slots))


def _prefix_is_covered(
    top_k: Tensor, keeps_all_k: Tensor, keeps_all_p: Tensor, *, capacity: int, covers_row: bool
) -> Tensor:
    """Whether a mode applies the top-k and top-p of each row, bool ``[R]``, as ``modes.uncovered`` has it."""
    is_off = keeps_all_k & keeps_all_p
    if not capacity:
        return is_off | (keeps_all_p & covers_row)
    among_candidates = (top_k >= 1) & (top_k <= capacity)
    return (among_candidates & ~is_off) | covers_row


def requests_with_rows(
    logits: Tensor, slots: Tensor, num_drafts: Tensor, draft_token_ids: Tensor, proposals: Tensor | None
) -> Requests:
    """Which requests have rows: those whose counts are in [0, K] and whose rows end within what was given."""
    is_count = (num_drafts >= 0) & (num_drafts <= draft_token_ids.shape[1])
    counts = torch.where(is_count, num_drafts, -1)
    fits = is_count & ((counts + 1).cumsum(0) <= logits.shape[0])
    if proposals is not None:
        fits = fits & (counts.clamp(min=0).cumsum(0) <= proposals.shape[0])
    kept = torch.where(fits, slots, _OUT_OF_RANGE)
    return Requests(kept, torch.where(fits, counts, -1), torch.where(num_drafts != -1, _flags(kept), 0))


def marked(drawn: SampleOutputs, slots: Tensor) -> SampleOutputs:
    """The draws of rows ``[R]``, with the flags of rows that are padding to the pipeline, by slots of ``RowTable``."""
    return SampleOutputs(drawn.token_ids, torch.where(slots < 0, _flags(slots), drawn.status))


def marked_requests(outputs: VerifyOutputs, flags: Tensor) -> VerifyOutputs:
    """The outputs of requests ``[N]``; those that have one of the ``flags``, int32 ``[N]``, emit nothing."""
    is_wrong = flags != 0
    return VerifyOutputs(
        outputs.token_ids,
        torch.where(is_wrong, 0, outputs.num_emitted),
        torch.where(is_wrong, 0, outputs.num_accepted),
        torch.where(is_wrong, 0, outputs.num_matching),
        torch.where(is_wrong, flags, outputs.status),
        node_ids=outputs.node_ids,
    )


def _flags(slots: Tensor) -> Tensor:
    """``RowStatus`` of rows whose slot is -1 or -2, int32 ``[R]``; 0 of others."""
    flags = torch.where(slots == _OUT_OF_RANGE, int(RowStatus.PARAMETER_OUT_OF_RANGE), 0)
    return torch.where(slots == _UNCOVERED, int(RowStatus.NOT_COVERED), flags).to(torch.int32)
