"""Token ids and status from the winners of races."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.batch import RowStatus, SampleOutputs
from compiled_sampler.core.order import MASKED_KEY, POSITIVE_INFINITY_KEY, packed_id, packed_key


def tokens_from_packed(best: Tensor, magnitude: Tensor, live: Tensor) -> SampleOutputs:
    """Token ids, int64, and status, int32, ``[R]`` each, from the best packed key of each row.

    Args:
        best: int64 ``[R]``, the largest packed (score key, id).
        magnitude: int32 ``[R]``, the ``nan_bits`` of the row.
        live: bool ``[R]``, false for padding.
    """
    return tokens_from_keys(packed_key(best), packed_id(best), magnitude, live)


def tokens_from_keys(key: Tensor, ids: Tensor, magnitude: Tensor, live: Tensor) -> SampleOutputs:
    """Token ids and status ``[R]`` from keys and ids ``[R]`` of the winners; else as ``tokens_from_packed``."""
    masked = key == MASKED_KEY
    token_ids = torch.where(live & ~masked, ids, -1)
    status = (
        torch.where(magnitude > POSITIVE_INFINITY_KEY, int(RowStatus.NAN_SEEN), 0)
        | torch.where(masked, int(RowStatus.ALL_MASKED), 0)
        | torch.where(key >= POSITIVE_INFINITY_KEY, int(RowStatus.POSITIVE_INFINITY), 0)
    )
    return SampleOutputs(token_ids, torch.where(live, status, -1).to(torch.int32))
