"""The final row of each request: how many of its drafts are accepted, and what its last token is drawn from."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import RowStatus
from compiled_sampler.core.noise import RESIDUAL, TARGET
from compiled_sampler.core.rows import RowParams, RowSlots, gather_rows, take
from compiled_sampler.passes.law import Law
from compiled_sampler.speculation.acceptance import Judged, in_range, proposed_of, rejectable
from compiled_sampler.speculation.row_layout import Layout


class Final(NamedTuple):
    """The one row of each request that a token is drawn from: of the first rejected draft, or after all drafts."""

    row_ids: Tensor
    """int64 ``[N]``, the index of the row."""
    num_accepted: Tensor
    """int64 ``[N]``, accepted drafts of the request."""
    num_matching: Tensor
    """int64 ``[N]``, see ``VerifyOutputs``."""
    drafts: Tensor
    """int64 ``[N]``, the rejected draft; -1 if none was rejected, or one that was not drawn from its proposal."""
    proposals: Tensor
    """int64 ``[N]``, the row of the proposals that the rejected draft was drawn from."""
    rows: RowParams
    """Parameters ``[N]``, with noise of RESIDUAL for a rejected draft, else of TARGET."""
    law: Law
    """Of the target ``[N]``."""
    proposed: Law | None
    """Of the proposal of the rejected draft ``[N]``; None for one-hot drafts."""
    carry: Tensor | None
    """float64 ``[N]``, see ``carried_ratio``; None for 1."""
    status: Tensor
    """int64 ``[N]``, the ``RowStatus`` flags that are known before the last token is drawn."""


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
