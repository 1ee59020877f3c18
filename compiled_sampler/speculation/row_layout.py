"""From requests to rows: request n owns ``num_drafts[n] + 1`` consecutive rows, one per token that it may emit.

Draft j of slot s stands in row ``s * K + j`` of a draft table, where a verification reads it in place: what was drawn
from is neither stacked nor brought into the order of the requests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import DraftTable, RequestRows
from compiled_sampler.passes.blocks import all_rows


class Trials(NamedTuple):
    """The inputs of each draft's test, in the order of the proposals; entries after the last draft belong to none."""

    row_ids: Tensor  # int64 [D], the row that judges the draft
    slots: Tensor  # int64 [D], the slot of that row; -1 for padding
    positions: Tensor  # int64 [D], the position of the token that this row predicts
    offsets: Tensor  # int64 [D], the number of rows of the same request before this row
    drafts: Tensor  # int64 [D], the draft; -1 where it is not a token id


class Layout(NamedTuple):
    """The request, the position and the draft of each row, for requests with different numbers of rows."""

    slots: Tensor  # int64 [R], the slot of the row's request; -1 for padding
    positions: Tensor  # int64 [R], the position of the token that the row predicts
    offsets: Tensor  # int64 [R], the number of rows of the same request before this row
    drafts: Tensor  # int64 [R], the draft that the row judges; -1 where there is none or it is not a token id
    proposals: Tensor  # int64 [R], the row of the proposals that the row's draft was drawn from
    trials: Trials  # row_layout makes [R], more than there are drafts; the pipeline cuts them to [D]
    first_rows: Tensor  # int64 [N], the first row of each request
    first_drafts: Tensor  # int64 [N], the first draft of each request, in the order of the proposals
    num_drafts: Tensor  # int64 [N], as given; -1 for padding without rows


class Starts(NamedTuple):
    """Where requests begin."""

    rows: Tensor  # int64 [N], the first row of each request
    drafts: Tensor  # int64 [N], the first draft of each request, in the order of the proposals


def request_starts(num_drafts: Tensor, *, searched: bool) -> Starts:
    """Where each request begins ``[N]``; arguments as ``row_layout``."""
    counts = num_drafts + 1, num_drafts.clamp(min=0)
    return Starts(*(first_rows(count, searched=searched) for count in counts))


def rows_of_requests(starts: Starts, draft_token_ids: Tensor, logits: Tensor, proposals: Tensor | None) -> RequestRows:
    """The rows of n consecutive requests of a batch: ``n * (K + 1)`` from the first one's on; ``n * K`` proposals."""
    count, width = draft_token_ids.shape
    return RequestRows(
        _following(starts.rows, count * (width + 1), logits),
        None if proposals is None else _following(starts.drafts, count * width, proposals),
    )


def _following(starts: Tensor, count: int, values: Tensor) -> Tensor:
    """The rows from the first start on, int64 ``[count]``; the last row of the values instead of those behind it."""
    return (starts[:1] + torch.arange(count, device=starts.device)).clamp(max=values.shape[0] - 1)


def row_layout(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    num_drafts: Tensor,
    draft_token_ids: Tensor,
    *,
    vocab_size: int,
    searched: bool = False,
) -> Layout:
    """The request, the position and the draft of each row ``[R]``, and the row that judges each draft."""
    # Of the logits only the number of rows is used.
    starts = first_rows(num_drafts + 1, searched=searched)
    first_drafts = first_rows(num_drafts.clamp(min=0), searched=searched)
    row = torch.arange(logits.shape[0], device=logits.device)
    request = request_of_row(starts, num_drafts, row, searched=searched)
    live = request < slots.shape[0]
    request = request.clamp(max=slots.shape[0] - 1)
    offsets = row - starts[request]
    owner = request_of_draft(first_drafts, num_drafts, row, searched=searched).clamp(max=slots.shape[0] - 1)
    place = row - first_drafts[owner]
    trials = Trials(
        row_ids=(starts[owner] + place).clamp(0, logits.shape[0] - 1),
        slots=slots[owner],
        positions=positions[owner] + place,
        offsets=place,
        drafts=_draft_of_row(draft_token_ids, owner, place, num_drafts, vocab_size),
    )
    return Layout(
        slots=torch.where(live, slots[request], -1),
        positions=positions[request] + offsets,
        offsets=offsets,
        drafts=torch.where(live, _draft_of_row(draft_token_ids, request, offsets, num_drafts, vocab_size), -1),
        proposals=first_drafts[request] + offsets,
        trials=trials,
        first_rows=starts,
        first_drafts=first_drafts,
        num_drafts=num_drafts,
    )


def with_padding(
    slots: Tensor, positions: Tensor, num_drafts: Tensor, draft_token_ids: Tensor, parents: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The tensors with one request more, which is padding without rows; arguments as ``row_layout``."""
    return (
        F.pad(slots, (0, 1), value=-1),
        F.pad(positions, (0, 1), value=0),
        F.pad(num_drafts, (0, 1), value=-1),
        F.pad(draft_token_ids, (0, 0, 0, 1), value=-1),
        None if parents is None else F.pad(parents, (0, 0, 0, 1), value=-1),
    )


def entries_of_rows(slots: Tensor, num_drafts: Tensor, positions: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The slot of the request that each row of logits belongs to, and the position of its token: int64 ``[R]`` each."""
    # Slots are -1 for rows behind the last request.
    starts, row = first_rows(num_drafts + 1, searched=True), torch.arange(rows, device=slots.device)
    owner, slot = owners(request_of_row(starts, num_drafts, row, searched=True), slots)
    return slot, positions[owner].to(torch.int64) + row - starts[owner]


def proposal_slots(proposals: Tensor, slots: Tensor, num_drafts: Tensor, *, searched: bool = False) -> Tensor:
    """The slot of the request that each row of draft logits belongs to, int64 ``[D]``; -1 behind the last draft."""
    first_drafts = first_rows(num_drafts.clamp(min=0), searched=searched)
    row = torch.arange(proposals.shape[0], device=proposals.device)
    return owners(request_of_draft(first_drafts, num_drafts, row, searched=searched), slots)[1]


def drafted(num_drafts: Tensor, width: int, count: int) -> Tensor:
    """``request * width + offset`` of each draft in the order of the requests, int64 ``[D]``; any after the last."""
    row = torch.arange(count, device=num_drafts.device)
    first_drafts = first_rows(num_drafts.clamp(min=0), searched=True)
    owner = request_of_draft(first_drafts, num_drafts, row, searched=True).clamp(max=num_drafts.shape[0] - 1)
    return owner * width + (row - first_drafts[owner]).clamp(0, width - 1)


def padded(token_ids: Tensor, num_drafts: Tensor, width: int) -> Tensor:
    """Drafts by request ``[N, K]``; any draft at the places behind the last of a request."""
    # It is called without a compiler, so a scan is one kernel, and memory for all pairs of requests is not needed.
    counts = num_drafts.clamp(min=0)
    first_drafts = counts.cumsum(0) - counts
    index = first_drafts[:, None] + torch.arange(width, device=token_ids.device)
    return token_ids[index.clamp(max=token_ids.shape[0] - 1)]


def first_rows(counts: Tensor, *, searched: bool = False) -> Tensor:
    """The first row of each request, int64 ``[N]``: the sum of the ``counts`` before it."""
    # For few requests it is a sum over a triangle, because Inductor would split a scan over several kernels. For many,
    # searched as for row_layout, the triangle would have more numbers than the rows have logits.
    if searched:
        return counts.cumsum(0) - counts
    index = torch.arange(counts.shape[0], device=counts.device)
    return torch.where(index < index[:, None], counts, 0).sum(-1)


def request_of_row(starts: Tensor, num_drafts: Tensor, row: Tensor, *, searched: bool) -> Tensor:
    """The request of each row of logits, int64: the number of requests that end before it; N behind the last."""
    ends = starts + num_drafts
    return torch.searchsorted(ends, row) if searched else (ends < row[:, None]).sum(-1)


def request_of_draft(first_drafts: Tensor, num_drafts: Tensor, row: Tensor, *, searched: bool) -> Tensor:
    """The request of each draft, int64: the number of requests whose drafts end before it; N behind the last."""
    ends = first_drafts + num_drafts.clamp(min=0)
    return torch.searchsorted(ends, row, right=True) if searched else (ends <= row[:, None]).sum(-1)


def owners(request: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The request that each row or draft belongs to, any behind the last, and its slot, there -1: int64 ``[n]``."""
    owner = request.clamp(max=slots.shape[0] - 1)
    return owner, torch.where(request < slots.shape[0], slots[owner], -1)


def _draft_of_row(
    draft_token_ids: Tensor, request: Tensor, offsets: Tensor, num_drafts: Tensor, vocab_size: int
) -> Tensor:
    """The draft that each row judges, int64; -1 where there is none or it is not a token id."""
    width = draft_token_ids.shape[1]
    if not width:
        return torch.full_like(request, -1)
    draft = draft_token_ids[request, offsets.clamp(0, width - 1)]
    return torch.where((offsets < num_drafts[request]) & (draft >= 0) & (draft < vocab_size), draft, -1)


class CachedRows(NamedTuple):
    """The logits that drafts were drawn from, where they stand in a draft table."""

    table: DraftTable  # [S + 1, K, V]
    row_ids: Tensor  # int64 [D], the row of each draft in the table, in the order of the requests


def rows_of_places(slots: Tensor, places: Tensor, table: DraftTable) -> Tensor:
    """Rows of a draft table, int64 ``[n]``, of the drafts at these places, in [0, K); padding has the last slot's."""
    count, width, _ = table.logits.shape
    return torch.where(slots < 0, count - 1, slots) * width + places


def rows_of_drafts(
    logits: Tensor, slots: Tensor, num_drafts: Tensor, table: DraftTable, *, searched: bool = False
) -> tuple[Tensor, Tensor]:
    """The slot, and the row of a draft table, of each draft in the order of the requests: int64 ``[R]`` each."""
    # Of the target's logits only R is used, which is more than there are drafts. Slots are -1 for padding and behind
    # the last draft, where the rows are those of padding.
    first_drafts = first_rows(num_drafts.clamp(min=0), searched=searched)
    draft = torch.arange(logits.shape[0], device=logits.device)
    owner, slot = owners(request_of_draft(first_drafts, num_drafts, draft, searched=searched), slots)
    places = (draft - first_drafts[owner]).clamp(0, table.logits.shape[1] - 1)
    return slot, rows_of_places(slot, places, table)


def gathered(values: Tensor | DraftTable, row_ids: Tensor) -> Tensor:
    """A copy of rows of a tensor or a draft table, ``[n, >=V]``, for passes that read all rows of a tensor."""
    return all_rows(values)[row_ids]
