"""Rows cut into blocks by hand: the first pass over the logits, and a second look at one block.

A reduction over a whole row is never split by Inductor when it is an argmax, and badly when it has a long producer.
Blocks padded before any arithmetic fuse their producers, run wide for a single row and leave a short second reduction.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import BlockMaxima
from compiled_sampler.order import (
    MASKED_KEY,
    indices,
    is_on_gpu,
    is_visible,
    key_float,
    magnitude_bits,
    order_key,
    pack,
    packed_id,
    row_logits,
)

_NO_ID = 2**31 - 1


def in_blocks(x: Tensor, block: int, fill: float) -> Tensor:
    """``[R, n]`` as ``[R, ceil(n / block), block]``, padded at the end with ``fill``.

    The padded row is viewed by strides: Inductor then sees a reduction over a contiguous buffer, which never leaves
    registers, and keeps a whole block of up to 1024 tokens in them. With ``view`` it loops over the block instead.
    """
    padding = -x.shape[1] % block
    if not padding:
        return x.view(x.shape[0], x.shape[1] // block, block)
    x = F.pad(x, (0, padding), value=fill)
    return x.as_strided((x.shape[0], x.shape[1] // block, block), (x.shape[1], block, 1))


def logit_blocks(logits: Tensor, vocab_size: int, block: int) -> tuple[Tensor, Tensor]:
    """Float32 logits ``[R, B, block]``, padded with -inf, and their int32 token ids ``[B, block]``."""
    x = in_blocks(row_logits(logits, vocab_size), block, float("-inf"))
    ids = indices(x.shape[1] * block, logits.device)
    return x, ids.view(-1, block)


def rows_in_blocks(values: Tensor, row_ids: Tensor, vocab_size: int, block: int) -> Tensor:
    """Float32 values of some rows ``[n, B, block]``, padded with -inf.

    The padding is masked by token id: Inductor would load the row ids under the mask of a pad, as floats.

    Args:
        values: float32, bfloat16 or float16 ``[R, >=V]``.
        row_ids: int64 ``[n]``, in ``[0, R)``.
        vocab_size: V.
        block: tokens a block.
    """
    if vocab_size % block == 0:
        return row_logits(values[row_ids], vocab_size).view(row_ids.shape[0], -1, block)
    ids = torch.arange(-(-vocab_size // block) * block, device=values.device).view(-1, block)
    x = values[row_ids[:, None, None], ids.clamp(max=vocab_size - 1)].to(torch.float32)
    return torch.where(ids < vocab_size, x, float("-inf"))


def rows_in_windows(values: Tensor, row_ids: Tensor, vocab_size: int, block: int) -> tuple[Tensor, Tensor]:
    """Float32 values of some rows ``[n, B, block]`` and their int32 token ids ``[B, block]``.

    Nothing is padded: the last block reaches back into the one before, which no maximum minds. Without a mask or a
    clamp for each token, loads are vectors.

    Args:
        values: float32, bfloat16 or float16 ``[R, >=V]``.
        row_ids: int64 ``[n]``, in ``[0, R)``.
        vocab_size: V.
        block: tokens a block.
    """
    if vocab_size < block:
        x = rows_in_blocks(values, row_ids, vocab_size, block)
        return x, indices(block, values.device)[None]
    first = torch.arange(-(-vocab_size // block), device=values.device) * block
    ids = first.clamp(max=vocab_size - block)[:, None] + torch.arange(block, device=values.device)
    return values[row_ids[:, None, None], ids].to(torch.float32), ids.to(torch.int32)


def own_tokens(ids: Tensor, block: int) -> Tensor:
    """False where a window reaches back into the block before: int32 ids ``[B, block]`` to bool."""
    return ids >= indices(ids.shape[0], ids.device)[:, None] * block


def order_maxima(logits: Tensor, *, vocab_size: int, block: int, names: bool = False) -> BlockMaxima:
    """The largest order key of each block of a row.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        vocab_size: V.
        block: tokens a block.
        names: whether the first token of each block's order is asked for.
    """
    x, ids = logit_blocks(logits, vocab_size, block)
    values = _comparable(x)
    best = values.amax(-1)
    return BlockMaxima(_key_of(best), nan_bits(x), first_of(values, best, ids) if names else None)


def largest_key(x: Tensor) -> Tensor:
    """The largest order key of logits along the last dimension: float32 ``[..., n]`` to int32 ``[...]``."""
    return _key_of(_comparable(x).amax(-1))


def _comparable(x: Tensor) -> Tensor:
    """What stands for the order of logits in a maximum: on a GPU their keys, in C++, where that costs less, floats."""
    return order_key(x) if is_on_gpu(x) else torch.where(is_visible(x), x, float("-inf"))


def _key_of(best: Tensor) -> Tensor:
    """The order key of a maximum over ``_comparable`` values."""
    return best if best.dtype == torch.int32 else order_key(best)


def first_of(values: Tensor, best: Tensor, ids: Tensor) -> Tensor:
    """The lowest id of the tokens that hold their block's best value, int32 ``[...]``.

    A comparison and a minimum, while the values are in registers: fewer instructions than maxima of packed keys, and
    a dependent kernel's second look at the best block is spared.

    Args:
        values: ``[..., n]``.
        best: ``[...]``, found among them.
        ids: int32 token ids, broadcastable to ``values``.
    """
    return torch.where(values == best[..., None], ids, _NO_ID).amin(-1)


def nan_bits(x: Tensor) -> Tensor:
    """Above ``POSITIVE_INFINITY_KEY`` exactly where one is a NaN: float32 ``[..., n]`` to int32 ``[...]``.

    In C++ from the maximum, which is a NaN if one is there; on a GPU integers are the cheaper again.
    """
    return magnitude_bits(x).amax(-1) if is_on_gpu(x) else magnitude_bits(x.amax(-1))


def coarser_keys(keys: Tensor, *, ratio: int) -> Tensor:
    """The largest keys of ``ratio`` neighbouring blocks: int32 ``[R, n]`` to ``[R, ceil(n / ratio)]``."""
    return in_blocks(keys, ratio, MASKED_KEY).amax(-1)


def largest_logit(keys: Tensor) -> Tensor:
    """The largest logit of each row, float32 ``[...]``, from the order keys of its blocks, int32 ``[..., B]``."""
    return key_float(keys.amax(-1))


def largest_in_each(keys: Tensor, count: int, block: int) -> Tensor:
    """``largest_logit`` for a kernel that reduces each of a row's blocks: float32 ``[R, count]`` or ``[R, 1]``.

    On a GPU each block looks through the row's keys again, made as wide as the block is: that is a kernel less. In C++,
    and where there are more keys than tokens in a block, it would take longer than the pass.

    Args:
        keys: int32 ``[R, B]``, order keys of blocks.
        count: blocks a row.
        block: tokens a block.
    """
    if not is_on_gpu(keys) or keys.shape[1] > block:
        return largest_logit(keys)[:, None]
    return largest_logit(widened(keys, block)[:, None].expand(-1, count, -1))


def largest_magnitude(magnitudes: Tensor) -> Tensor:
    """The ``nan_bits`` of each row from those of its blocks: int32 ``[R, B]`` to ``[R]``."""
    return magnitudes.amax(-1)


def widened(values: Tensor, block: int) -> Tensor:
    """Int32 ``[R, B]`` as wide as a block at least, padded with ``MASKED_KEY``.

    A look at the best block then reduces blocks and tokens over one width, which makes it one kernel.
    """
    missing = block - values.shape[1]
    return F.pad(values, (0, missing), value=MASKED_KEY) if missing > 0 else values


def best_block(logits: Tensor, keys: Tensor, vocab_size: int, block: int) -> tuple[Tensor, Tensor]:
    """Logits and ids of the first block that holds the largest key of a row; -inf beyond the block.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        keys: int32 ``[R, B]``, the largest key of each block.
        vocab_size: V.
        block: tokens a block.

    Returns:
        float32 logits and int32 ids ``[R, max(B, block)]``.
    """
    keys = widened(keys, block)
    index = indices(keys.shape[1], keys.device)
    best = packed_id(pack(keys, index).amax(-1, keepdim=True))
    offset = torch.arange(keys.shape[1], device=keys.device)
    ids = best * block + offset
    x = gather_logits(logits, ids, vocab_size)
    return torch.where(offset < block, x, float("-inf")), ids.to(torch.int32)


def first_token(logits: Tensor, blocks: BlockMaxima, vocab_size: int, block: int) -> tuple[Tensor, Tensor]:
    """The first token of each row's order, by a second look at its block where blocks do not name theirs.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        blocks: the ``order_maxima``.
        vocab_size: V.
        block: tokens a block.

    Returns:
        The packed (key, id), int64, and the ``nan_bits`` of the row, int32, ``[R]`` each.
    """
    if blocks.token_ids is not None:
        return best_named(blocks)
    x, ids = best_block(logits, blocks.keys, vocab_size, block)
    return pack(order_key(x), ids).amax(-1), widened(blocks.magnitudes, block).amax(-1)


def best_named(blocks: BlockMaxima) -> tuple[Tensor, Tensor]:
    """``first_token`` where blocks name theirs."""
    assert blocks.token_ids is not None
    return pack(blocks.keys, blocks.token_ids).amax(-1), blocks.magnitudes.amax(-1)


def gather_logits(logits: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Float32 logits of the given tokens, -inf where an id is outside ``[0, V)``.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        ids: int64 ``[R, ...]``.
        vocab_size: V.
    """
    inside = ids < vocab_size
    x = logits.gather(1, ids.clamp(0, vocab_size - 1).flatten(1)).view(ids.shape).to(torch.float32)
    return torch.where(inside, x, float("-inf"))
