"""Narrowing: the first C tokens of a row's order, exactly, without sorting the row.

A token among the first C of the total order lies in one of the first C blocks in the order of (block maximum, block
index), because each block before its own holds a token that stands before it. So a row is cut into blocks, the C best
blocks are cut into smaller blocks, and so on down to single tokens. On a GPU a level has at most 512 keys, of which
``ranking.py`` finds the largest; on the CPU, where numpy selects, there may be thousands. Nothing is
approximate, and the work does not depend on the values.

For many rows on a GPU, a kernel costs more than what it computes: there the stages ``choose_*`` find the blocks of a
level and choose among them in one kernel. They take the maximum of a block's parts one by one, because Inductor would
make a kernel of its own of a second reduction.
"""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.core.order import MASKED_KEY, indices, order_key, pack, packed_id, visible
from compiled_sampler.passes.blocks import AnyLogits, gather_logits, logit_blocks
from compiled_sampler.passes.maxima import coarser_keys
from compiled_sampler.passes.ranking import choose

STORED_BLOCK = 64
"""Tokens per block of the first pass over the logits."""

FAN_OUT = 8
"""Children per block: 64 picked blocks give 512 keys."""


def all_coarser(keys: Tensor, *, ratio: int) -> Tensor:
    """Packed (key, index) of blocks ``ratio`` times as large as those of the first pass: int64 ``[R, n / ratio]``."""
    return number(coarser_keys(keys, ratio=ratio) if ratio > 1 else keys)


def number(keys: Tensor) -> Tensor:
    """Packed (key, index) of int32 keys: ``[R, n]`` to int64 ``[R, n]``."""
    return pack(keys, indices(keys.shape[1], keys.device))


def all_blocks(logits: AnyLogits, *, vocab_size: int, size: int) -> Tensor:
    """Packed (key, index) of all blocks of ``size`` tokens of a row: int64 ``[R, ceil(V / size)]``."""
    x, _ = logit_blocks(logits, vocab_size, size)
    return number(order_key(x).amax(-1))


def child_blocks(keys: Tensor, parents: Tensor, *, ratio: int, size: int) -> Tensor:
    """Packed (key, index) of the blocks inside the parents, int64 ``[R, C * ratio]``, from maxima of the first pass.

    Args:
        keys: int32 ``[R, n]``, block maxima of the first pass.
        parents: int64 ``[R, C]``, packed (key, index) of the larger blocks.
        ratio: smaller blocks per larger block.
        size: blocks of the first pass per smaller block.

    Returns:
        int64 ``[R, C * ratio]``, distinct in a row.
    """
    index = children(parents, ratio)
    stored = index[:, :, None] * size + torch.arange(size, device=keys.device)
    inside = stored < keys.shape[1]
    found = keys.gather(1, stored.clamp(max=keys.shape[1] - 1).flatten(1)).view(stored.shape)
    return pack(torch.where(inside, found, MASKED_KEY).amax(-1), index.to(torch.int32))


def child_tokens(logits: AnyLogits, parents: Tensor, *, vocab_size: int, ratio: int, size: int) -> Tensor:
    """Packed (key, index) of the blocks of ``size`` tokens inside the parents, int64 ``[R, C * ratio]``, from logits.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        parents: int64 ``[R, C]``, packed (key, index) of blocks of ``ratio * size`` tokens.
        vocab_size: V.
        ratio: smaller blocks per larger block.
        size: tokens per smaller block.

    Returns:
        int64 ``[R, C * ratio]``, distinct in a row.
    """
    index = children(parents, ratio)
    tokens = index[:, :, None] * size + torch.arange(size, device=parents.device)
    keys = order_key(gather_logits(logits, tokens, vocab_size)).amax(-1)
    return pack(keys, index.to(torch.int32))


def children(parents: Tensor, ratio: int) -> Tensor:
    """Indices of the ``ratio`` blocks inside each parent: packed keys ``[R, C]`` to int64 ``[R, C * ratio]``."""
    first = packed_id(parents) * ratio
    return (first[:, :, None] + torch.arange(ratio, device=parents.device)).flatten(1)


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
    logits: AnyLogits, parents: Tensor, *, vocab_size: int, ratio: int, size: int, count: int
) -> Tensor:
    """The first ``count`` of the blocks that ``narrowing.child_tokens`` finds: int64 packed ``[R, min(count, n)]``."""
    index = children(parents, ratio)
    parts = [visible(gather_logits(logits, index * size + offset, vocab_size)) for offset in range(size)]
    return _chosen(pack(order_key(reduce(torch.maximum, parts)), index.to(torch.int32)), count)


def _chosen(packed: Tensor, count: int) -> Tensor:
    return choose(packed, count=count) if count < packed.shape[1] else packed
