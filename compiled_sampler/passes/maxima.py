"""The first pass over the logits: the best key of each block and whether it holds a NaN; then the best of a row.

The first pass of a greedy mode, or of one with candidates, reads every logit for these keys. Made with the copy that
edits need, while the logits are in registers, they take no time: 47 us for both of 128 rows of 151,936 tokens on an
H100, not 47 and 24.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import DraftTable
from compiled_sampler.core.order import (
    LEAST_NORMAL_KEY,
    MASKED_KEY,
    float_key,
    indices,
    key_float,
    magnitude_bits,
    order_key,
    pack,
    packed_id,
    visible,
)
from compiled_sampler.core.rows import RowParams, RowSlots, gather_rows
from compiled_sampler.core.stage import holds
from compiled_sampler.edits.allowed_token_ids import AllowedIds
from compiled_sampler.edits.custom import customized
from compiled_sampler.edits.history import AnyHistory
from compiled_sampler.edits.masks import masked
from compiled_sampler.edits.tables import CustomTables
from compiled_sampler.logit_edit import CustomEdits
from compiled_sampler.passes.blocks import (
    AnyLogits,
    Slice,
    gather_logits,
    in_blocks,
    in_slices,
    logit_slices,
    rows_in_windows,
    widened,
)


def kept_in_kernel(anchor: Tensor, values: Tensor | float, otherwise: Tensor | float) -> Tensor:
    """``torch.where(anchor, values, otherwise)``: makes Inductor compute ``values`` in the kernel of ``anchor``."""
    # Inductor makes a separate kernel of a constant, or of a reduction whose inputs no other computation reads. Behind
    # a condition the value belongs to the kernel that computes or reads anchor. Rows in which the condition selects
    # otherwise do not exist, or no stage reads their result.
    return torch.where(anchor, values, otherwise)


_NAN_BITS = _NO_ID = 2**31 - 1


class BlockMaxima(NamedTuple):
    """The best token of each block of a row, and whether the block holds a NaN."""

    keys: Tensor
    """int32 ``[R, B]``, the largest key of a block."""
    nan_bits: Tensor
    """int32 ``[R, B]``, above ``POSITIVE_INFINITY_KEY`` exactly where the block holds a NaN, see ``nan_bits_of``."""
    token_ids: Tensor | None = None
    """int32 ``[R, B]``, the first token with that key; None where the pass does not name tokens."""


@holds(tokens=True)
def order_maxima(
    logits: AnyLogits, *, vocab_size: int, block: int, slices: int = 1, by_bits: bool = False, names: bool = False
) -> BlockMaxima:
    """The largest order key of each block of a row, int32 ``[R, B]``, with ``nan_bits`` and, if asked, token ids."""
    return _order_maxima(logit_slices(logits, vocab_size, block, slices), by_bits, names)


@holds(tokens=True, whole=1)
def order_maxima_of(
    logits: Tensor | DraftTable,
    row_ids: Tensor,
    *,
    vocab_size: int,
    block: int,
    slices: int = 1,
    by_bits: bool = False,
) -> BlockMaxima:
    """``order_maxima`` ``[n, B]`` of the rows ``row_ids``, int64 ``[n]``, with token ids."""
    x, ids = rows_in_windows(logits, row_ids, vocab_size, block)
    return _order_maxima(in_slices(x, ids, slices), by_bits, names=True)


def _order_maxima(slices: list[Slice], by_bits: bool, names: bool) -> BlockMaxima:
    """The block maxima of blocks given as slices; by bits, only the block's best value is made a key."""
    if by_bits:
        values = [visible_bits(x) for x, _ in slices]
        best = best_bits(*values)
        key = order_key(best.view(torch.float32))
    else:
        values = [order_key(x) for x, _ in slices]
        best = key = largest_key(*(x for x, _ in slices))
    token_ids = first_of(values, best, slices[0].ids) if names else None
    return BlockMaxima(key, nan_bits_of(*(x for x, _ in slices), by_bits=by_bits), token_ids)


def largest_key(*slices: Tensor) -> Tensor:
    """The largest order key in the last dimension of all slices: float32 ``[..., n]`` to int32 ``[...]``."""
    # C++ reduces floats five times as fast as int32. A maximum of floats may take denormals for zeros, so where the
    # largest logit is either, the maximum of the keys decides, which are exact floats near 0.
    parts = [visible(part) for part in slices]
    near = [float_key(part).clamp(-LEAST_NORMAL_KEY, LEAST_NORMAL_KEY).to(torch.float32) for part in parts]
    best, best_near = (reduce(torch.maximum, part).amax(-1) for part in (parts, near))
    return torch.where(best_near.abs() < LEAST_NORMAL_KEY, best_near.to(torch.int32), order_key(best))


def visible_bits(x: Tensor) -> Tensor:
    """The int32 bits of ``visible`` logits for ``best_bits``: adding 0 turns ``-0.0`` into ``0.0``."""
    return (visible(x) + 0.0).view(torch.int32)


def best_bits(*slices: Tensor) -> Tensor:
    """The bits with the largest ``score_order`` in the last dimension of slices: int32 ``[..., n]`` to ``[...]``."""
    # As integers, the bits of non-negative floats ascend and the bits of negative floats descend, so the best is the
    # largest integer, or the smallest where all are negative. Two plain reductions cost less than a key per element.
    largest = reduce(torch.maximum, slices).amax(-1)
    return torch.where(largest < 0, reduce(torch.minimum, slices).amin(-1), largest)


def first_of(slices: list[Tensor], best: Tensor, ids: Tensor) -> Tensor:
    """The lowest id of the tokens that hold their block's best value, int32 ``[R, B]``."""
    # Comparisons and a minimum, while the values are in registers, take fewer instructions than maxima of packed keys,
    # and save a dependent kernel from reading the best block again.
    if len(slices) == 1:
        return torch.where(slices[0] == best[..., None], ids, _NO_ID).amin(-1)
    width = ids.shape[-1]
    places = torch.full_like(slices[0], len(slices) * width, dtype=torch.int32)  # counted from the first slice
    for number, values in reversed(list(enumerate(slices))):
        places = torch.where(values == best[..., None], number * width, places)
    return (places + ids).amin(-1)


def nan_bits_of(*slices: Tensor, by_bits: bool = False) -> Tensor:
    """Int32 ``[...]``, above ``POSITIVE_INFINITY_KEY`` exactly where one of the float32 ``[..., n]`` is a NaN."""
    # A maximum of floats is a NaN if one of them is, and C++ has that maximum already. By bits, the result is the
    # maximum of magnitudes as integers or, of several slices, comes from the sum of magnitudes, which is a NaN in no
    # other case: additions cost less than shuffles between threads.
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
    """The largest logit of each row, float32 ``[R, count]`` or ``[R, 1]``, for a kernel that reduces blocks."""
    # per_block reduces the row's keys anew in each block, widened to the block's size, which saves a kernel in Triton;
    # for more keys than tokens in a block that would take longer than the pass.
    if not per_block or keys.shape[1] == 1 or keys.shape[1] > block:
        return largest_logit(keys)[:, None]
    return largest_logit(widened(keys, block)[:, None].expand(-1, count, -1))


def row_nan_bits(nan_bits: Tensor, width: int) -> Tensor:
    """The ``nan_bits`` of each row from those of its blocks: int32 ``[R, B]`` to ``[R]``."""
    # Blocks are first reduced to width, the width of the other reductions in the kernel, so that they share the kernel.
    missing = width - nan_bits.shape[1]
    if missing > 0:
        return F.pad(nan_bits, (0, missing)).amax(-1)
    starts = [*range(0, -missing, width), -missing]  # the last part may overlap the one before
    parts = [nan_bits[:, start : start + width] for start in starts]
    return reduce(torch.maximum, parts).amax(-1)


def rows_of_blocks(keys: Tensor, row_slots: RowSlots, *, stream: int) -> tuple[RowParams, Tensor]:
    """``gather_rows`` and the largest logit of each row, float32 ``[R]``, from order keys ``[R, B]`` of its blocks."""
    rows = gather_rows(row_slots, stream=stream)
    return rows, largest_of_live(keys, row_slots.slots >= 0)


def mass_units(keys: Tensor, row_slots: RowSlots) -> tuple[Tensor, Tensor]:
    """The largest logit and the scale of each row, float32 ``[R]`` each, which define the unit of its masses."""
    return largest_of_live(keys, row_slots.slots >= 0), row_slots.table.scale[row_slots.slots.clamp(min=0)]


def largest_of_live(keys: Tensor, live: Tensor) -> Tensor:
    """The largest logit of each row, in the kernel that gathers its parameters; -inf for padding."""
    return kept_in_kernel(live, largest_logit(keys), float("-inf"))


def best_block(logits: AnyLogits, keys: Tensor, vocab_size: int, block: int) -> tuple[Tensor, Tensor]:
    """Float32 logits and int32 ids ``[R, max(B, block)]`` of the block with a row's largest key; -inf beyond it."""
    keys = widened(keys, block)
    index = indices(keys.shape[1], keys.device)
    best = packed_id(pack(keys, index).amax(-1, keepdim=True))
    offset = torch.arange(keys.shape[1], device=keys.device)
    ids = best * block + offset
    x = gather_logits(logits, ids, vocab_size)
    return torch.where(offset < block, x, float("-inf")), ids.to(torch.int32)


def first_token(logits: AnyLogits, blocks: BlockMaxima, vocab_size: int, block: int) -> tuple[Tensor, Tensor]:
    """The first token of each row's order, int64 packed, and ``nan_bits``; ``[R]`` each."""
    # Where blocks do not name their tokens, the best block is read again.
    if blocks.token_ids is not None:
        return best_named(blocks)
    x, ids = best_block(logits, blocks.keys, vocab_size, block)
    return pack(order_key(x), ids).amax(-1), widened(blocks.nan_bits, block).amax(-1)


def best_named(blocks: BlockMaxima) -> tuple[Tensor, Tensor]:
    """``first_token`` for blocks that name their tokens."""
    assert blocks.token_ids is not None
    return pack(blocks.keys, blocks.token_ids).amax(-1), blocks.nan_bits.amax(-1)


@holds(tokens=True)
def masked_with_maxima(
    logits: Tensor,
    token_bitmask: Tensor | None,
    slots: Tensor,
    allowed: AllowedIds | None,
    *,
    vocab_size: int,
    block: int,
    slices: int,
    by_bits: bool,
    names: bool = False,
) -> tuple[Tensor, BlockMaxima]:
    """``masked`` float32 ``[R, V]``, and its ``order_maxima`` ``[R, B]``; arguments as there."""
    x = masked(logits, token_bitmask, slots, allowed, vocab_size=vocab_size)
    return x, order_maxima(x, vocab_size=vocab_size, block=block, slices=slices, by_bits=by_bits, names=names)


@holds(tokens=True)
def customized_with_maxima(
    logits: Tensor,
    token_bitmask: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    allowed: AllowedIds | None,
    tables: CustomTables,
    given: tuple[Tensor, ...],
    history: AnyHistory | None,
    *,
    edits: CustomEdits,
    vocab_size: int,
    block: int,
    slices: int,
    by_bits: bool,
    names: bool = False,
) -> tuple[Tensor, BlockMaxima]:
    """``customized`` float32 ``[R, V]``, and its ``order_maxima`` ``[R, B]``; arguments as there."""
    read = token_bitmask, slots, positions, allowed, tables, given, history
    x = customized(logits, *read, edits=edits, vocab_size=vocab_size)
    return x, order_maxima(x, vocab_size=vocab_size, block=block, slices=slices, by_bits=by_bits, names=names)
