"""The outputs of a verification: accepted drafts, the last token, and counts, in few kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import RowStatus, SampleOutputs, VerifyOutputs
from compiled_sampler.speculation.acceptance import in_range
from compiled_sampler.speculation.final_row import Final, leading, status_of, window
from compiled_sampler.speculation.row_layout import Layout

_MOST_COLUMNS = 8
_NOT_COVERED = int(RowStatus.NOT_COVERED)


def emit_matches(
    draws: SampleOutputs, layout: Layout, slots: Tensor, draft_token_ids: Tensor, *, vocab_size: int
) -> VerifyOutputs:
    """The outputs of the rule ``match``, from the target's own draws.

    Args:
        draws: the target's own token and status of every row ``[R]``.
        layout: the request, the position and the draft of each row ``[R]``.
        slots: int64 ``[N]``; -1 for padding.
        draft_token_ids: int64 ``[N, K]``.
        vocab_size: V.
    """
    width = draft_token_ids.shape[1]
    accepted = (draws.token_ids == layout.drafts) & (layout.drafts >= 0)
    num_accepted, num_matching = leading(accepted, layout.first_rows, layout, width)
    index = in_range(layout.first_rows + num_accepted, draws.status)
    flags, _ = window(draws.status, layout.first_rows, layout, width)
    status = draws.status[index] | status_of(flags, num_accepted, layout, draft_token_ids, vocab_size)
    return _emit(draws.token_ids[index], status, (num_accepted, num_matching), slots, draft_token_ids)


def emit_final(last: SampleOutputs, final: Final, slots: Tensor, draft_token_ids: Tensor) -> VerifyOutputs:
    """The outputs of each request from its last token: accepted drafts, then that token, then -1.

    Args:
        last: the token drawn last and the status ``[N]``.
        final: the counts of each request ``[N]``.
        slots: int64 ``[N]``; -1 for padding.
        draft_token_ids: int64 ``[N, K]``.
    """
    counts = (final.num_accepted, final.num_matching)
    return _emit(last.token_ids, last.status, counts, slots, draft_token_ids)


def _emit(
    last: Tensor, status: Tensor, counts: tuple[Tensor, Tensor], slots: Tensor, draft_token_ids: Tensor
) -> VerifyOutputs:
    """The outputs of each request from its last token, status and counts (accepted, matching); -1 for padding.

    A last token of -1, of a row that is all masked, is no token to commit. Of a request that is not covered nothing is
    emitted, whatever its drafts are.
    """
    num_accepted, num_matching = counts
    is_uncovered = (status & _NOT_COVERED) != 0  # of padding too, whose status is -1
    nothing = torch.where(slots >= 0, 0, -1)  # to count
    live = (slots >= 0) & ~is_uncovered
    return VerifyOutputs(
        _emitted(last, torch.where(live, num_accepted, -1), draft_token_ids),
        torch.where(live, num_accepted + (last >= 0), nothing),
        torch.where(live, num_accepted, nothing),
        torch.where(live, num_matching, nothing),
        torch.where(live, status, torch.where(slots >= 0, _NOT_COVERED, -1)).to(torch.int32),
    )


def _emitted(last: Tensor, num_accepted: Tensor, draft_token_ids: Tensor) -> Tensor:
    """Accepted drafts, then the last token, then -1: ``[N, K+1]``; all -1 for padding, whose ``num_accepted`` is -1.

    Fewer than ``_MOST_COLUMNS`` drafts are written column by column: the kernel that finds the last token then writes
    the columns too, which saves a kernel.
    """
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
