"""What a sampler returns as vLLM's records have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors


def with_endings(token_ids: Tensor, ending: int | Tensor) -> Tensor:
    """New tokens ``[N]``, those of ``ending`` for requests that get none: vLLM wants a token of each."""
    if isinstance(ending, int):
        return torch.nn.functional.threshold(token_ids, -1, ending)  # one kernel
    return torch.where(token_ids < 0, ending.to(token_ids.dtype), token_ids)


def logprob_columns(token_ids: Tensor, outputs: Any, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fields of LogprobsTensors: ids int32 and logprobs float32 ``[R, top+1]``, drawn tokens first; ranks ``[R]``.

    ``outputs`` are the LogprobOutputs of the tokens ``[N, 1]`` or ``[N, K+1]``, of ``top`` tokens or more.
    """
    rows = token_ids.numel()
    ids = torch.empty(rows, top + 1, dtype=torch.int32, device=token_ids.device)
    tops = outputs.top_token_ids, outputs.top
    top_ids, logprobs = (columns.reshape(rows, columns.shape[-1])[:, :top] for columns in tops)
    torch.cat([token_ids.reshape(rows, 1), top_ids], -1, out=ids)
    return ids, torch.cat([outputs.token.reshape(rows, 1), logprobs], -1), outputs.rank.reshape(rows)


class GaplessLogprobs(LogprobsTensors):  # type: ignore[misc]
    """Logprobs where -1 stands for tokens of the order that the law leaves out; on the host, other tokens do."""

    # vLLM makes a dictionary of a row's tokens, and decodes each. On the device the same takes ten launches.

    __slots__ = ()

    def to_cpu_nonblocking(self) -> GaplessLogprobs:
        """A copy on the host, after the current stream."""
        return type(self)(*super().to_cpu_nonblocking())

    def filter(self, mask: Tensor) -> GaplessLogprobs:
        """Some of the rows."""
        return type(self)(*super().filter(mask))

    def tolists(self, cu_num_generated_tokens: list[int] | None = None) -> Any:
        """Arrays of numpy."""
        lists = super().tolists(cu_num_generated_tokens)
        return lists._replace(logprob_token_ids=without_gaps(lists.logprob_token_ids))


def without_gaps(token_ids: np.ndarray) -> np.ndarray:
    """Tokens ``[R, n+1]``, n at most V, with others of the vocabulary for -1, so that no id stands in a row twice."""
    rows = np.flatnonzero((token_ids < 0).any(1)).tolist()
    if rows:
        token_ids = token_ids.copy()
    for row in rows:
        row_ids = token_ids[row]
        is_gap = row_ids < 0
        row_ids[is_gap] = np.setdiff1d(np.arange(len(row_ids)), row_ids)[: is_gap.sum()]
    return token_ids
