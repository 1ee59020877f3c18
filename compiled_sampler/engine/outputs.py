"""Results as callers get them: of empty batches, and in tensors of their own."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from compiled_sampler.batch import SampleOutputs, VerifyOutputs

Results = TypeVar("Results", bound=tuple[Tensor, ...])


def no_tokens(device: torch.device) -> SampleOutputs:
    """The results of a batch without rows."""
    token_ids = torch.empty(0, dtype=torch.int64, device=device)
    return SampleOutputs(token_ids, token_ids.to(torch.int32))


def no_drafts(width: int, device: torch.device) -> VerifyOutputs:
    """The results of verifying ``width`` drafts for no request."""
    count, status = no_tokens(device)
    token_ids = torch.empty(0, width + 1, dtype=torch.int64, device=device)
    return VerifyOutputs(token_ids, count, count.clone(), count.clone(), status)


def copied(results: Results, out: Results) -> Results:
    """``out``, filled with the results."""
    for source, target in zip(results, out, strict=True):
        target.copy_(source)
    return out
