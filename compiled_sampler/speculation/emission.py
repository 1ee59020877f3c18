"""What a verification emits: the final row of each request, accepted drafts, the last token, counts, results by place.

The final row is the one that the last token is drawn from: that of the first rejected draft, or after all drafts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import RowStatus, SampleOutputs, VerifyOutputs
from compiled_sampler.core.noise import RESIDUAL, TARGET
from compiled_sampler.core.rows import RowParams, RowSlots, gather_rows, take
from compiled_sampler.logprobs import LogprobOutputs
from compiled_sampler.passes.law import Law
from compiled_sampler.speculation.acceptance import Judged, in_range, proposed_of, rejectable
from compiled_sampler.speculation.row_layout import Layout, first_rows, request_of_row


class Final(NamedTuple):
    """The one row of each request that a token is drawn from: of the first rejected draft, or after all drafts."""

    row_ids: Tensor  # int64 [N], the index of the row
    num_accepted: Tensor  # int64 [N], accepted drafts of the request
    num_matching: Tensor  # int64 [N], see VerifyOutputs
    drafts: Tensor
    """int64 ``[N]``, the rejected draft; -1 if none was rejected, or one that was not drawn from its proposal."""
    proposals: Tensor  # int64 [N], the row of the proposals that the rejected draft was drawn from
    rows: RowParams  # parameters [N], with noise of RESIDUAL for a rejected draft, else of TARGET
    law: Law  # of the target [N]
    proposed: Law | None  # of the proposal of the rejected draft [N]; None for one-hot drafts
    carry: Tensor | None  # float64 [N], see carried_ratio, of a tree 1 / Walk.debt where above 1; None for 1
    status: Tensor  # int64 [N], the RowStatus flags that are known before the last token is drawn


def final_rows(
    judged: Judged,
    carry: Tensor | None,
    prefixes: Tensor | None,
    layout: Layout,
    requests: RowSlots,
    draft_token_ids: Tensor,
    *,
    vocab_size: int,
    by_draft: bool,
) -> Final:
    """The final row of each request ``[N]``: how many drafts are accepted, and the inputs of the last token's draw."""
    # by_draft: whether the target's law has one entry per draft instead of one per row.
    width = draft_token_ids.shape[1]
    num_accepted, num_matching = leading(judged.accepted, layout.first_drafts, layout, width)
    if prefixes is not None:
        passed, _ = window(prefixes, layout.first_rows, layout, width)
        steps = torch.arange(width + 1, device=passed.device)
        num_accepted = torch.where(passed & (steps <= layout.num_drafts[:, None]), steps, 0).amax(-1)
    index = in_range(layout.first_rows + num_accepted, layout.slots)
    rejected, proposals = rejectable(layout, judged.is_possible)[index], layout.first_drafts + num_accepted
    stream = torch.where(rejected >= 0, RESIDUAL, TARGET)
    flags, exists = window(judged.law.status, layout.first_drafts if by_draft else layout.first_rows, layout, width)
    if by_draft:  # a row without a draft has no law; its flags come with the last token
        flags = torch.where(exists, flags, 0)
    status = status_of(flags, num_accepted, layout, draft_token_ids, vocab_size, judged.is_possible)
    last = requests._replace(positions=requests.positions + num_accepted)
    return Final(
        row_ids=index,
        num_accepted=num_accepted,
        num_matching=num_matching,
        drafts=rejected,
        proposals=proposals,
        rows=gather_rows(last, stream=stream),
        law=take(judged.law, in_range(proposals, judged.law.total) if by_draft else index),
        proposed=proposed_of(judged.proposed, proposals),
        carry=take(carry, index),
        status=status,
    )


def status_of(
    flags: Tensor,
    num_accepted: Tensor,
    layout: Layout,
    draft_token_ids: Tensor,
    vocab_size: int,
    is_possible: Tensor | None = None,
) -> Tensor:
    """The ``RowStatus`` flags of the emitted rows, and of drafts that are out of range or impossible: int64 ``[N]``."""
    width = draft_token_ids.shape[1]
    steps = torch.arange(width + 1, device=flags.device)
    exists = steps < layout.num_drafts[:, None]
    drafts = F.pad(draft_token_ids, (0, 1))
    is_token = (drafts >= 0) & (drafts < vocab_size)
    status = (exists & ~is_token).sum(-1).clamp(max=1) * int(RowStatus.DRAFT_OUT_OF_RANGE)
    if is_possible is not None:
        possible, _ = window(is_possible, layout.first_drafts, layout, width)
        impossible = (exists & is_token & ~possible).sum(-1).clamp(max=1)
        status = status | impossible * int(RowStatus.DRAFT_IMPOSSIBLE)
    emitted = torch.where(steps <= num_accepted[:, None], flags, 0)
    for flag in (RowStatus.NAN_SEEN, RowStatus.POSITIVE_INFINITY):
        status = status | (emitted & int(flag)).amax(-1)
    return status


def window(values: Tensor, starts: Tensor, layout: Layout, width: int) -> tuple[Tensor, Tensor]:
    """``values`` at each request's start and the ``width`` after it, ``[N, width + 1]``; and where a draft stands."""
    steps = torch.arange(width + 1, device=values.device)
    return values[in_range(starts[:, None] + steps, values)], steps < layout.num_drafts[:, None]


def leading(accepted: Tensor, starts: Tensor, layout: Layout, width: int) -> tuple[Tensor, Tensor]:
    """The number of drafts accepted before the first rejection, and in all, int64 ``[N]``; arguments as ``window``."""
    is_accepted, exists = window(accepted, starts, layout, width)
    steps = torch.arange(width + 1, device=accepted.device)
    good = is_accepted & exists
    return torch.where(good, width + 1, steps).amin(-1), good.sum(-1)


_MOST_COLUMNS = 8
_NOT_COVERED = int(RowStatus.NOT_COVERED)


def emit_matches(
    draws: SampleOutputs, layout: Layout, slots: Tensor, draft_token_ids: Tensor, *, vocab_size: int
) -> VerifyOutputs:
    """The outputs of the rule ``match``, from the target's own draws."""
    width = draft_token_ids.shape[1]
    accepted = (draws.token_ids == layout.drafts) & (layout.drafts >= 0)
    num_accepted, num_matching = leading(accepted, layout.first_rows, layout, width)
    index = in_range(layout.first_rows + num_accepted, draws.status)
    flags, _ = window(draws.status, layout.first_rows, layout, width)
    status = draws.status[index] | status_of(flags, num_accepted, layout, draft_token_ids, vocab_size)
    counts, live = (num_accepted, num_matching), slots >= 0  # an uncovered request draws -1, which no draft is
    return outputs_of(draws.token_ids[index], status, counts, live, slots, draft_token_ids)


def emit_final(last: SampleOutputs, final: Final, slots: Tensor, draft_token_ids: Tensor) -> VerifyOutputs:
    """The outputs of each request from its last token: accepted drafts, then that token, then -1."""
    counts = (final.num_accepted, final.num_matching)
    return outputs_of(last.token_ids, last.status, counts, final.rows.idle == 0, slots, draft_token_ids)


def outputs_of(
    last: Tensor,
    status: Tensor,
    counts: tuple[Tensor, Tensor],
    live: Tensor,
    slots: Tensor,
    draft_token_ids: Tensor,
) -> VerifyOutputs:
    """The outputs of each request from its last token, status and counts (accepted, matching); -1 for padding."""
    # A last token of -1, of a row that is all masked, is no token to commit. Requests that are not live emit nothing.
    # What decides so is one comparison: columns of a longer expression would be a kernel of their own on a GPU.
    num_accepted, num_matching = counts
    nothing = torch.where(slots >= 0, 0, -1)  # to count
    alone = torch.where((status & _NOT_COVERED) != 0, _NOT_COVERED, status)
    return VerifyOutputs(
        _placed_tokens(last, torch.where(live, num_accepted, -1), draft_token_ids),
        torch.where(live, num_accepted + (last >= 0), nothing),
        torch.where(live, num_accepted, nothing),
        torch.where(live, num_matching, nothing),
        torch.where(slots >= 0, alone, -1).to(torch.int32),
    )


def _placed_tokens(last: Tensor, num_accepted: Tensor, draft_token_ids: Tensor) -> Tensor:
    """Accepted drafts, then the last token, then -1: ``[N, K+1]``; all -1 for padding, whose ``num_accepted`` is -1."""
    # Fewer than _MOST_COLUMNS drafts are written column by column: the kernel that finds the last token then writes the
    # columns too, which saves a kernel.
    width = draft_token_ids.shape[1]
    if width >= _MOST_COLUMNS:
        steps, num_accepted = torch.arange(width + 1, device=last.device), num_accepted[:, None]
        kept = torch.where(steps < num_accepted, F.pad(draft_token_ids, (0, 1), value=-1), -1)
        return torch.where(steps == num_accepted, last[:, None], kept)
    columns = [
        torch.where(num_accepted == step, last, torch.where(num_accepted > step, draft_token_ids[:, step], -1))
        for step in range(width)
    ]
    return torch.stack([*columns, torch.where(num_accepted == width, last, -1)], 1)


class EmittedRows(NamedTuple):
    """The request and the token of each row of logits ``[R]``; rows without an emitted token are padding."""

    slots: Tensor  # int64 [R], the slot of the row's request; -1 where the row emits nothing
    token_ids: Tensor  # int64 [R], the token that the row emits; -1 for none


def emitted_rows(
    logits: Tensor, slots: Tensor, num_drafts: Tensor, token_ids: Tensor, node_ids: Tensor | None = None
) -> EmittedRows:
    """The token that each row emits, for requests with different numbers of rows."""
    # Of the logits only the number of rows is used.
    starts, row = first_rows(num_drafts + 1, searched=True), torch.arange(logits.shape[0], device=logits.device)
    request = request_of_row(starts, num_drafts, row, searched=True)
    live = request < slots.shape[0]
    request = request.clamp(max=slots.shape[0] - 1)
    place = row - starts[request]
    if node_ids is not None:  # of trees, whose first row is that of no node
        places, width = torch.arange(token_ids.shape[1], device=logits.device), token_ids.shape[1]
        place = torch.where(F.pad(node_ids + 1, (1, 0))[request] == place[:, None], places, width).amin(-1)
        live = live & (place < width)
    emitted = torch.where(live, token_ids[request, place.clamp(0, token_ids.shape[1] - 1)], -1)
    return EmittedRows(torch.where(emitted >= 0, slots[request], -1), emitted)


def by_request(
    rows: LogprobOutputs, num_drafts: Tensor, token_ids: Tensor, node_ids: Tensor | None = None
) -> LogprobOutputs:
    """Results of rows ``[R, ...]`` by request and place, ``[N, K+1, ...]``; -1 and -inf where no token is emitted."""
    place = torch.arange(token_ids.shape[1], device=token_ids.device)
    if node_ids is not None:  # of trees, whose first row is that of no node
        place = F.pad(node_ids.clamp(min=0) + 1, (1, 0))
    index = first_rows(num_drafts + 1, searched=True)[:, None] + place
    index = index.clamp(max=rows.token.shape[0] - 1)
    return LogprobOutputs(*(_placed(values, index, token_ids >= 0) for values in rows))


def _placed(values: Any, index: Tensor, is_emitted: Tensor) -> Any:
    """``values`` ``[R, ...]`` at ``index`` ``[N, K+1]``, with -1 or -inf where nothing is emitted; None stays None."""
    if values is None:
        return None
    nothing = float("-inf") if values.is_floating_point() else -1
    return torch.where(is_emitted.view(*index.shape, *(1,) * (values.dim() - 1)), values[index], nothing)
