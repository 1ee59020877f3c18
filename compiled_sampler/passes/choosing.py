"""Levels of narrowing in one kernel each: blocks are found and, with ``ranking.choose``, chosen where they are found.

For many rows on a GPU a kernel costs more than what it computes. So nothing is written between the two, and a block's
best is the larger of its parts one by one: of a second reduction Inductor would make a kernel of its own.
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
    """The first ``count`` of the blocks that ``narrowing.all_coarser`` finds, or all: int64 ``[R, min(count, n)]``."""
    keys = F.pad(keys, (0, -keys.shape[1] % ratio), value=MASKED_KEY)
    parts = keys.view(keys.shape[0], keys.shape[1] // ratio, ratio).unbind(2)
    return _chosen(number(reduce(torch.maximum, parts)), count)


def choose_child_blocks(keys: Tensor, parents: Tensor, *, ratio: int, size: int, count: int) -> Tensor:
    """The first ``count`` of the blocks that ``narrowing.child_blocks`` finds, or all."""
    index = children(parents, ratio)
    parts = [index * size + offset for offset in range(size)]
    found = [keys.gather(1, part.clamp(max=keys.shape[1] - 1)) for part in parts]
    inside = [torch.where(part < keys.shape[1], key, MASKED_KEY) for part, key in zip(parts, found, strict=True)]
    return _chosen(pack(reduce(torch.maximum, inside), index.to(torch.int32)), count)


def choose_child_tokens(
    logits: Tensor, parents: Tensor, *, vocab_size: int, ratio: int, size: int, count: int
) -> Tensor:
    """The first ``count`` of the blocks that ``narrowing.child_tokens`` finds, or all."""
    index = children(parents, ratio)
    parts = [visible(gather_logits(logits, index * size + offset, vocab_size)) for offset in range(size)]
    return _chosen(pack(order_key(reduce(torch.maximum, parts)), index.to(torch.int32)), count)


def _chosen(packed: Tensor, count: int) -> Tensor:
    return choose(packed, count=count) if count < packed.shape[1] else packed
