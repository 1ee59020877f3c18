"""What a sampler returns as vLLM's SamplerOutput."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_sampler.logprobs import LogprobOutputs, mapped


def with_endings(token_ids: Tensor, endings: Tensor) -> Tensor:
    """Tokens int32 ``[N, K+1]`` with an ending one where a request would get none, as vLLM cannot go on without."""
    first = torch.where(token_ids[:, :1] < 0, endings[:, None], token_ids[:, :1])
    return torch.cat([first, token_ids[:, 1:]], -1).to(torch.int32)


def logprob_columns(token_ids: Tensor, found: LogprobOutputs, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fields of LogprobsTensors: ids int32 and logprobs float32 ``[R, n+1]``, the drawn token first; ranks ``[R]``."""
    rows = token_ids.numel()
    dims = found.token.dim()  # of ``[N]`` in a step without drafts, of ``[N, K+1]`` in one with
    flat = mapped(found, lambda each: each.reshape(rows, *each.shape[dims:]))
    ids, logprobs = token_ids.reshape(rows, 1), flat.token[:, None]
    if flat.top is not None and flat.top_token_ids is not None:
        top = without_gaps(flat.top_token_ids, vocab_size)
        ids, logprobs = torch.cat([ids, top.to(torch.int32)], -1), torch.cat([logprobs, flat.top], -1)
    ranks: Any = flat.rank
    return ids, logprobs, ranks


def without_gaps(top_token_ids: Tensor, vocab_size: int) -> Tensor:
    """The first tokens of the order with other tokens where a filter keeps fewer, so that no id stands there twice."""
    # vLLM makes a dictionary of the n tokens, and decodes each id; V is at least n.
    rows, count = top_token_ids.shape
    named = torch.zeros(rows, vocab_size + 1, dtype=torch.bool, device=top_token_ids.device)
    named.scatter_(1, torch.where(top_token_ids < 0, vocab_size, top_token_ids), True)
    others = torch.argsort(named[:, :vocab_size].to(torch.int8), dim=1, stable=True)[:, :count]
    places = torch.arange(count, device=top_token_ids.device) - (top_token_ids >= 0).sum(1, keepdim=True)
    return torch.where(top_token_ids < 0, others.gather(1, places.clamp(min=0)), top_token_ids)
