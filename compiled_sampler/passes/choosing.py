"""Levels of narrowing as one kernel each: a stage finds the blocks and, with ``ranking.choose``, picks the best.

For many rows on a GPU a kernel launch costs more than the kernel computes, so nothing is written between finding and
picking. A block's best is the elementwise maximum of its parts, because Inductor would make a separate kernel of a
second reduction.
"""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.core.order import MASKED_KEY, order_key, pack, visible
from compiled_sampler.passes.blocks import gather_logits
from compiled_sampler.passes.narrowing import children, number
from compiled_sampler.passes.ranking import choose


def choose_blocks(keys: Tensor, *, ratio: int, count: int) -> Tensor:
    """The first ``count`` of the n blocks that ``narrowing.all_coarser`` finds: int64 packed ``[R, min(count, n)]``."""
    keys = F.pad(keys, (0, -keys.shape[1] % ratio), value=MASKED_KEY)
    parts = keys.view(keys.shape[0], keys.shape[1] // ratio, ratio).unbind(2)
    return _chosen(number(reduce(torch.maximum, parts)), count)


def choose_child_blocks(keys: Tensor, parents: Tensor, *, ratio: int, size: int, count: int) -> Tensor:
    """The first ``count`` of the blocks that ``narrowing.child_blocks`` finds: int64 packed ``[R, min(count, n)]``."""
    index = children(parents, ratio)
    parts = [index * size + offset for offset in range(size)]
    found = [keys.gather(1, part.clamp(max=keys.shape[1] - 1)) for part in parts]
    inside = [torch.where(part < keys.shape[1], key, MASKED_KEY) for part, key in zip(parts, found, strict=True)]
    return _chosen(pack(reduce(torch.maximum, inside), index.to(torch.int32)), count)


def choose_child_tokens(
    logits: Tensor, parents: Tensor, *, vocab_size: int, ratio: int, size: int, count: int
) -> Tensor:
    """The first ``count`` of the blocks that ``narrowing.child_tokens`` finds: int64 packed ``[R, min(count, n)]``."""
    index = children(parents, ratio)
    parts = [visible(gather_logits(logits, index * size + offset, vocab_size)) for offset in range(size)]
    return _chosen(pack(order_key(reduce(torch.maximum, parts)), index.to(torch.int32)), count)


def _chosen(packed: Tensor, count: int) -> Tensor:
    return choose(packed, count=count) if count < packed.shape[1] else packed
