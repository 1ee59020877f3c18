"""What a verification returns, as TokenSpeed reads it; needs no TokenSpeed."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.batch import VerifyOutputs


def emitted(made: VerifyOutputs) -> tuple[Tensor, Tensor]:
    """Tokens int32 ``[B, N]``, and how many of each request are emitted, int32 ``[B]``, at least 1."""
    # A request that has no token emits 0, as TokenSpeed cannot go on without one.
    return made.token_ids.clamp(min=0).to(torch.int32), made.num_emitted.clamp(min=1).to(torch.int32)


def accepted_places(lengths: Tensor, width: int) -> Tensor:
    """The row of logits of each emitted token, int32 ``[B, N]``, -1 behind the last; lengths are int32 ``[B]``."""
    places = torch.arange(width, device=lengths.device, dtype=torch.int32)
    first = torch.arange(len(lengths), device=lengths.device, dtype=torch.int32)[:, None] * width
    return torch.where(places < lengths[:, None], first + places, -1)
