"""Token ids and status from the winners of races, and the tokens before a winner."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.batch import RowStatus, SampleOutputs
from compiled_sampler.core.order import MASKED_KEY, POSITIVE_INFINITY_KEY, Last, order_key, packed_id, packed_key
from compiled_sampler.passes.blocks import AnyLogits, gather_logits


def tokens_from_packed(best: Tensor, magnitude: Tensor, idle: Tensor) -> SampleOutputs:
    """Token ids, int64, and status, int32, ``[R]`` each, from the best packed key of each row.

    Args:
        best: int64 ``[R]``, the largest packed (score key, id).
        magnitude: int32 ``[R]``, the ``nan_bits`` of the row.
        idle: int32 ``[R]``, from ``idle_status``.
    """
    return tokens_from_keys(packed_key(best), packed_id(best), magnitude, idle)


def tokens_from_keys(key: Tensor, ids: Tensor, magnitude: Tensor, idle: Tensor) -> SampleOutputs:
    """Token ids and status ``[R]`` from keys and ids ``[R]`` of the winners; else as ``tokens_from_packed``."""
    masked, live = key == MASKED_KEY, idle == 0
    token_ids = torch.where(live & ~masked, ids, -1)
    status = (
        torch.where(magnitude > POSITIVE_INFINITY_KEY, int(RowStatus.NAN_SEEN), 0)
        | torch.where(masked, int(RowStatus.ALL_MASKED), 0)
        | torch.where(key >= POSITIVE_INFINITY_KEY, int(RowStatus.POSITIVE_INFINITY), 0)
    )
    return SampleOutputs(token_ids, torch.where(live, status, idle).to(torch.int32))


def last_before_winner(logits: AnyLogits, token_ids: Tensor, *, vocab_size: int) -> Last:
    """A ``Last`` ``[R]`` that exactly the tokens before the given tokens reach: the key of each, and its id less 1.

    For id -1, which stands for no token, the result is arbitrary: such a row has no winner under any threshold.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        token_ids: int64 ``[R]``.
        vocab_size: V.
    """
    x = gather_logits(logits, token_ids[:, None], vocab_size)[:, 0]
    return Last(order_key(x), (token_ids - 1).to(torch.int32))
