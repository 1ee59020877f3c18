"""What a sampler returns as vLLM's SamplerOutput."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_sampler.logprobs import LogprobOutputs, mapped


def with_endings(token_ids: Tensor, endings: Tensor) -> Tensor:
    """Tokens with an ending one where a request would get none, as vLLM cannot go on without.

    Args:
        token_ids: int64 ``[N, K+1]``, -1 behind the last token of each request.
        endings: int64 ``[N]``, for a request whose first row is all masked.

    Returns:
        int32 ``[N, K+1]``, -1 behind the last token, of which each request has one.
    """
    first = torch.where(token_ids[:, :1] < 0, endings[:, None], token_ids[:, :1])
    return torch.cat([first, token_ids[:, 1:]], -1).to(torch.int32)


def logprob_columns(token_ids: Tensor, found: LogprobOutputs, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of LogprobsTensors: ids int32 and logprobs float32 ``[R, n+1]``, the drawn token first; ranks ``[R]``.

    Args:
        token_ids: int32 ``[N, K+1]``.
        found: fields ``[N, ...]`` of a step without drafts, ``[N, K+1, ...]`` of one with, of the law "raw" or
            "filtered".
        vocab_size: V.
    """
    rows = token_ids.numel()
    dims = found.token.dim()
    flat = mapped(found, lambda each: each.reshape(rows, *each.shape[dims:]))
    ids, logprobs = token_ids.reshape(rows, 1), flat.token[:, None]
    if flat.top is not None and flat.top_token_ids is not None:
        top = without_gaps(flat.top_token_ids, vocab_size)
        ids, logprobs = torch.cat([ids, top.to(torch.int32)], -1), torch.cat([logprobs, flat.top], -1)
    ranks: Any = flat.rank
    return ids, logprobs, ranks


def without_gaps(top_token_ids: Tensor, vocab_size: int) -> Tensor:
    """The first tokens of the order with other tokens where a filter keeps fewer, so that no id stands there twice.

    vLLM makes a dictionary of them, and decodes each id.

    Args:
        top_token_ids: int64 ``[R, n]``, -1 behind the last token that is kept.
        vocab_size: V, at least n.
    """
    rows, count = top_token_ids.shape
    named = torch.zeros(rows, vocab_size + 1, dtype=torch.bool, device=top_token_ids.device)
    named.scatter_(1, torch.where(top_token_ids < 0, vocab_size, top_token_ids), True)
    others = torch.argsort(named[:, :vocab_size].to(torch.int8), dim=1, stable=True)[:, :count]
    places = torch.arange(count, device=top_token_ids.device) - (top_token_ids >= 0).sum(1, keepdim=True)
    return torch.where(top_token_ids < 0, others.gather(1, places.clamp(min=0)), top_token_ids)
