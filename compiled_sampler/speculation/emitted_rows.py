"""The rows of logits that a verification emits a token from, and results of rows by request and place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_sampler.logprobs import LogprobOutputs
from compiled_sampler.speculation.row_layout import first_rows, request_of_row


class EmittedRows(NamedTuple):
    """The request and the token of each row of logits ``[R]``; rows without an emitted token are padding."""

    slots: Tensor
    """int64 ``[R]``, the slot of the row's request; -1 where the row emits nothing."""
    token_ids: Tensor
    """int64 ``[R]``, the token that the row emits; -1 for none."""


def emitted_rows(logits: Tensor, slots: Tensor, num_drafts: Tensor, token_ids: Tensor) -> EmittedRows:
    """The token that each row emits, for requests with different numbers of rows.

    Args:
        logits: ``[R, >=V]``; only the number of rows is used.
        slots: int64 ``[N]``; -1 for padding.
        num_drafts: int64 ``[N]``; -1 for padding without rows.
        token_ids: int64 ``[N, K+1]``, ``VerifyOutputs.token_ids``, whose tail is -1.
    """
    starts, row = first_rows(num_drafts + 1, searched=True), torch.arange(logits.shape[0], device=logits.device)
    request = request_of_row(starts, num_drafts, row, searched=True)
    live = request < slots.shape[0]
    request = request.clamp(max=slots.shape[0] - 1)
    place = (row - starts[request]).clamp(0, token_ids.shape[1] - 1)
    emitted = torch.where(live, token_ids[request, place], -1)
    return EmittedRows(torch.where(emitted >= 0, slots[request], -1), emitted)


def by_request(rows: LogprobOutputs, num_drafts: Tensor, token_ids: Tensor) -> LogprobOutputs:
    """Results of rows ``[R, ...]`` by request and place, ``[N, K+1, ...]``; -1 and -inf where no token is emitted.

    Args:
        rows: of the ``emitted_rows``.
        num_drafts: int64 ``[N]``; -1 for padding without rows.
        token_ids: int64 ``[N, K+1]``, as for ``emitted_rows``.
    """
    place = torch.arange(token_ids.shape[1], device=token_ids.device)
    index = first_rows(num_drafts + 1, searched=True)[:, None] + place
    index = index.clamp(max=rows.token.shape[0] - 1)
    return LogprobOutputs(*(_placed(each, index, token_ids >= 0) for each in rows))


def _placed(values: Any, index: Tensor, is_emitted: Tensor) -> Any:
    """``values`` ``[R, ...]`` at ``index`` ``[N, K+1]``, with -1 or -inf where nothing is emitted; None stays None."""
    if values is None:
        return None
    nothing = float("-inf") if values.is_floating_point() else -1
    return torch.where(is_emitted.view(*index.shape, *(1,) * (values.dim() - 1)), values[index], nothing)
