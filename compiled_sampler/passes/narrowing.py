"""Narrowing: the first C tokens of a row's order, exactly, without sorting the row.

A token among the first C of the total order lies in one of the first C blocks in the order of (block maximum, block
index), because each block before its own holds a token that stands before it. So a row is cut into blocks, the C best
blocks are cut into smaller blocks, and so on down to single tokens. On a GPU a level has at most 512 keys, of which
``ranking.py`` finds the largest; on the CPU, where ``selection.py`` selects, there may be thousands. Nothing is
approximate, and the work does not depend on the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.order import MASKED_KEY, indices, order_key, pack, packed_id
from compiled_sampler.passes.blocks import gather_logits, logit_blocks
from compiled_sampler.passes.maxima import coarser_keys

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


def all_blocks(logits: Tensor, *, vocab_size: int, size: int) -> Tensor:
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


def child_tokens(logits: Tensor, parents: Tensor, *, vocab_size: int, ratio: int, size: int) -> Tensor:
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
    tokens = index[:, :, None] * size + torch.arange(size, device=logits.device)
    keys = order_key(gather_logits(logits, tokens, vocab_size)).amax(-1)
    return pack(keys, index.to(torch.int32))


def children(parents: Tensor, ratio: int) -> Tensor:
    """Indices of the ``ratio`` blocks inside each parent: packed keys ``[R, C]`` to int64 ``[R, C * ratio]``."""
    first = packed_id(parents) * ratio
    return (first[:, :, None] + torch.arange(ratio, device=parents.device)).flatten(1)
