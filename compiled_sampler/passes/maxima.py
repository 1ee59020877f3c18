"""The first pass over the logits: the best of each block, and whether there is a NaN; then the best of a row."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.core.order import (
    MASKED_KEY,
    indices,
    key_float,
    magnitude_bits,
    order_key,
    pack,
    packed_id,
    visible,
)
from compiled_sampler.core.rows import Entries, Rows, gather_rows
from compiled_sampler.passes.blocks import (
    Slice,
    gather_logits,
    in_blocks,
    in_slices,
    logit_slices,
    rows_in_windows,
    widened,
)
from compiled_sampler.passes.fusion import kept_in_kernel

_NAN_BITS = _NO_ID = 2**31 - 1


class BlockMaxima(NamedTuple):
    """The best token of each block of a row, and what shows a NaN in it."""

    keys: Tensor
    """int32 ``[R, B]``, the largest key of a block."""
    magnitudes: Tensor
    """int32 ``[R, B]``, the ``nan_bits`` of a block."""
    token_ids: Tensor | None = None
    """int32 ``[R, B]``, the first token with that key, or its rank in a race; None where blocks do not name theirs."""


def order_maxima(
    logits: Tensor, *, vocab_size: int, block: int, slices: int = 1, by_bits: bool = False, names: bool = False
) -> BlockMaxima:
    """The largest order key of each block of a row.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        vocab_size: V.
        block: tokens a block.
        slices: parts of a block that a thread reduces alone, see ``blocks.in_slices``.
        by_bits: compare floats as integers, which takes fewer instructions in Triton and more in C++.
        names: return the first token of each block's order too.
    """
    return _order_maxima(logit_slices(logits, vocab_size, block, slices), by_bits, names)


def order_maxima_of(
    logits: Tensor, row_ids: Tensor, *, vocab_size: int, block: int, slices: int = 1, by_bits: bool = False
) -> BlockMaxima:
    """``order_maxima`` of the rows in ``row_ids``, int64 ``[n]``, with the token of each block."""
    x, ids = rows_in_windows(logits, row_ids, vocab_size, block)
    return _order_maxima(in_slices(x, ids, slices), by_bits, names=True)


def _order_maxima(slices: list[Slice], by_bits: bool, names: bool) -> BlockMaxima:
    """The block maxima of slices of blocks; by bits, adding 0 makes ``-0.0`` the other zero, and a key is made once."""
    values = [visible(x) for x, _ in slices]
    if by_bits:
        values = [(each + 0.0).view(torch.int32) for each in values]
        best = best_bits(*values)
        key = order_key(best.view(torch.float32))
    else:
        best = reduce(torch.maximum, values).amax(-1)
        key = order_key(best)
    found = first_of(values, best, slices[0].ids) if names else None
    return BlockMaxima(key, nan_bits(*(x for x, _ in slices), by_bits=by_bits), found)


def largest_key(x: Tensor) -> Tensor:
    """The largest order key of logits along the last dimension: float32 ``[..., n]`` to int32 ``[...]``."""
    return order_key(visible(x).amax(-1))


def best_bits(*slices: Tensor) -> Tensor:
    """The bits with the largest ``score_order`` along the last dimension of all: int32 ``[..., n]`` to ``[...]``.

    As integers, the bits of non-negative floats ascend and those of negative floats descend, so the answer is the
    largest integer, or the smallest where all are negative. Two plain reductions cost less than a key an element.
    """
    largest = reduce(torch.maximum, slices).amax(-1)
    return torch.where(largest < 0, reduce(torch.minimum, slices).amin(-1), largest)


def first_of(slices: list[Tensor], best: Tensor, ids: Tensor) -> Tensor:
    """The lowest id of the tokens that hold their block's best value, int32 ``[R, B]``.

    Comparisons and a minimum, while the values are in registers: fewer instructions than maxima of packed keys, and a
    dependent kernel's second look at the best block is spared.

    Args:
        slices: ``[R, B, n]``, values of the slices of each block.
        best: ``[R, B]``, found among them.
        ids: int32 ``[B, n]``, token ids of the first slice; those of the next follow.
    """
    if len(slices) == 1:
        return torch.where(slices[0] == best[..., None], ids, _NO_ID).amin(-1)
    width = ids.shape[-1]
    places = torch.full_like(slices[0], len(slices) * width, dtype=torch.int32)  # counted from the first slice
    for number, values in reversed(list(enumerate(slices))):
        places = torch.where(values == best[..., None], number * width, places)
    return (places + ids).amin(-1)


def nan_bits(*slices: Tensor, by_bits: bool = False) -> Tensor:
    """Int32 ``[...]`` above ``POSITIVE_INFINITY_KEY`` exactly where one of float32 ``[..., n]`` is a NaN.

    A maximum of floats is a NaN if one is there, which C++ finds beside the maximum. By bits it is the maximum of
    integers or, of several slices, the sum of magnitudes, which is a NaN in no other case: additions cost less than
    shuffles between threads.
    """
    if not by_bits:
        return magnitude_bits(reduce(torch.maximum, slices).amax(-1))
    if len(slices) == 1:
        return magnitude_bits(slices[0]).amax(-1)
    return reduce(torch.add, [x.abs() for x in slices]).sum(-1).isnan().to(torch.int32) * _NAN_BITS


def coarser_keys(keys: Tensor, *, ratio: int) -> Tensor:
    """The largest keys of ``ratio`` neighbouring blocks: int32 ``[R, n]`` to ``[R, ceil(n / ratio)]``."""
    return in_blocks(keys, ratio, MASKED_KEY).amax(-1)


def largest_logit(keys: Tensor) -> Tensor:
    """The largest logit of each row, float32 ``[...]``, from the order keys of its blocks, int32 ``[..., B]``."""
    return key_float(keys.amax(-1))


def largest_in_each(keys: Tensor, count: int, block: int, *, per_block: bool) -> Tensor:
    """The largest logit of each row for a kernel that reduces its blocks: float32 ``[R, count]`` or ``[R, 1]``.

    Args:
        keys: int32 ``[R, B]``, order keys of blocks.
        count: blocks a row.
        block: tokens a block.
        per_block: look through the row's keys in each block, widened to the block's size, which spares a kernel in
            Triton; not done where there are more keys than tokens in a block, where it takes longer than the pass.
    """
    if not per_block or keys.shape[1] == 1 or keys.shape[1] > block:
        return largest_logit(keys)[:, None]
    return largest_logit(widened(keys, block)[:, None].expand(-1, count, -1))


def largest_magnitude(magnitudes: Tensor, width: int) -> Tensor:
    """The ``nan_bits`` of each row from those of its blocks: int32 ``[R, B]`` to ``[R]``.

    Made as wide first as what else a kernel reduces for the row, so that it is no kernel of its own.
    """
    missing = width - magnitudes.shape[1]
    if missing > 0:
        return F.pad(magnitudes, (0, missing)).amax(-1)
    starts = [*range(0, -missing, width), -missing]  # the last part may overlap the one before
    parts = [magnitudes[:, start : start + width] for start in starts]
    return reduce(torch.maximum, parts).amax(-1)


def rows_of_blocks(keys: Tensor, entries: Entries, *, stream: int) -> tuple[Rows, Tensor]:
    """``gather_rows`` and the largest logit of each row, float32 ``[R]``, from order keys ``[R, B]`` of its blocks."""
    rows = gather_rows(entries, stream=stream)
    return rows, _largest_of_live(keys, rows.live)


def mass_units(keys: Tensor, entries: Entries) -> tuple[Tensor, Tensor]:
    """What a row's masses are measured in: its largest logit and its scale, float32 ``[R]`` each.

    Args:
        keys: int32 ``[R, B]``, order keys of the row's blocks.
        entries: ``[R]``.
    """
    return _largest_of_live(keys, entries.slots >= 0), entries.table.scale[entries.slots.clamp(min=0)]


def _largest_of_live(keys: Tensor, live: Tensor) -> Tensor:
    """The largest logit of each row, made beside what is gathered by its slot; -inf for padding."""
    return kept_in_kernel(live, largest_logit(keys), float("-inf"))


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
