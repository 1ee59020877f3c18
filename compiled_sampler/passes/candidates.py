"""The candidates: the first C tokens of a row's order, exactly, without sorting the row.

A token among the first C of the total order lies in one of the first C blocks in the order of (block maximum, block
index), because each block before its own holds a token that stands before it. So a row is cut into blocks, the C best
blocks are cut into smaller blocks, and so on down to single tokens. Nothing is approximate, and the work does not
depend on the values.

A level of a GPU has at most 512 packed keys, of which the largest are found in one of three ways. For few rows, keys
are ranked by counting and placed by their rank: two kernels that are as wide as the GPU. For more rows, one kernel
finds the set of the largest keys bit by bit, in a third of the instructions of a sort. A sort is used for the last few
keys and their order. On the CPU a level may have thousands of keys: numpy's selections and sorts of integers use vector
instructions, and take 30 us for the first 64 of 4,096 keys of 8 rows, where torch takes 70.

For many rows on a GPU, a kernel costs more than what it computes: there the stages ``choose_*`` find the blocks of a
level and choose among them in one kernel. They take the maximum of a block's parts one by one, because Inductor would
make a kernel of its own of a second reduction.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.core.order import MASKED_KEY, indices, order_key, pack, packed_id, packed_key, visible
from compiled_sampler.core.stage import holds
from compiled_sampler.passes.blocks import AnyLogits, gather_logits, logit_blocks
from compiled_sampler.passes.maxima import coarser_keys

MOST_CHOSEN = 1023
"""Most keys per row that ``choose`` accepts: a count of them has ten bits."""

_PADDING = -(2**63)  # below every packed key
_TEN_BITS = 2**10 - 1
_ONE, _TWO, _THREE = 1, 1 + 2**10, 1 + 2**10 + 2**20  # three counts of ten bits: for a key that reaches 1, 2, 3 pivots


def sort(packed: Tensor, *, count: int) -> Tensor:
    """The ``count`` largest packed keys in descending order: int64 ``[R, n]`` to ``[R, count]``."""
    width = _width(packed)
    packed = F.pad(packed, (0, width - packed.shape[1]), value=_PADDING) if width > packed.shape[1] else packed
    return packed.sort(-1, descending=True).values[:, :count]


def rank(packed: Tensor) -> Tensor:
    """The number of larger keys in the row, int32 ``[R, n]``, for each of the distinct int64 ``packed`` ``[R, n]``."""
    return (packed[:, None, :] > packed[:, :, None]).sum(-1, dtype=torch.int32)


def place(packed: Tensor, ranks: Tensor, *, count: int) -> Tensor:
    """The ``count`` largest packed keys in descending order: int64 ``[R, count]``."""
    ordered = packed.new_empty((packed.shape[0], _width(packed)))
    return ordered.index_put((_row_of(packed), ranks.to(torch.int64)), packed)[:, :count]


def choose(packed: Tensor, *, count: int) -> Tensor:
    """The ``count`` largest packed keys in the order of the input: int64 ``[R, n]`` to ``[R, count]``."""
    # Ids ascend in a row, so among equal keys the first in the input are the largest packed keys; n is at most
    # MOST_CHOSEN.
    keys = packed_key(packed)
    least = _least_of_the_largest(keys, count)
    above, tied = (keys > least).to(torch.int32), (keys == least).to(torch.int32)
    counts = above + (tied << 16)  # two counts in one
    before = counts.cumsum(-1, dtype=torch.int32) - counts
    above_before, tied_before = before & 0xFFFF, before >> 16
    room = count - above.sum(-1, keepdim=True, dtype=torch.int32)
    is_chosen = (above > 0) | ((tied > 0) & (tied_before < room))
    within = (above_before + torch.minimum(tied_before, room)).to(torch.int64)
    beyond = count + torch.arange(packed.shape[1], device=packed.device)  # distinct places for all other keys
    chosen = packed.new_empty((packed.shape[0], count + packed.shape[1]))
    return chosen.index_put((_row_of(packed), torch.where(is_chosen, within, beyond)), packed)[:, :count]


def _least_of_the_largest(keys: Tensor, count: int) -> Tensor:
    """The smallest of the ``count`` largest keys: int32 ``[R, n]`` to ``[R, 1]``."""
    # It is the largest number that at least count keys reach. Its bits are found two at a time, by counting the keys
    # that reach each of three pivots: one reduction for three counts, because each step waits for the step before.
    least = torch.full_like(keys[:, :1], MASKED_KEY)  # the smallest int32
    for bit in range(30, -1, -2):
        first = least + 2**bit
        second = first + 2**bit  # added one by one: 3 * 2**30 would exceed int32
        third = second + 2**bit
        low, high = torch.where(keys >= first, _ONE, 0), torch.where(keys >= third, _THREE, _TWO)
        counts = torch.where(keys >= second, high, low).to(torch.int32).sum(-1, keepdim=True, dtype=torch.int32)
        least = torch.where(counts & _TEN_BITS >= count, first, least)
        least = torch.where((counts >> 10) & _TEN_BITS >= count, second, least)
        least = torch.where(counts >> 20 >= count, third, least)
    return least


def _row_of(packed: Tensor) -> Tensor:
    """Row indices, int64 ``[R, 1]``."""
    return torch.arange(packed.shape[0], device=packed.device)[:, None]


def _width(packed: Tensor) -> int:
    """The power of two that a row of keys is padded to."""
    # Inductor sorts powers of two; place uses the same width, so that the stages that follow are the same for both.
    return int(1 << (packed.shape[1] - 1).bit_length())


def largest(keys: Tensor, count: int) -> Tensor:
    """The ``count`` largest keys in descending order: integers ``[R, n]`` on the CPU to ``[R, count]``."""
    unsorted = np.partition(keys.numpy(), -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(unsorted, axis=-1)[:, ::-1].copy())


def select(packed: Tensor, *, count: int) -> Tensor:
    """``largest`` as a stage: int64 ``[R, n]`` to ``[R, count]``."""
    selected: Tensor = torch.ops.compiled_sampler.cpu_select(packed, count)
    return selected


def _unfilled(packed: Tensor, count: int) -> Tensor:
    return packed.new_empty((packed.shape[0], count))


torch.library.define("compiled_sampler::cpu_select", "(Tensor packed, int count) -> Tensor")
torch.library.impl("compiled_sampler::cpu_select", "cpu", largest)  # a custom_op costs 10 to 20 us more per call
torch.library.register_fake("compiled_sampler::cpu_select", _unfilled)


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


@holds(tokens=True)
def all_blocks(logits: AnyLogits, *, vocab_size: int, size: int) -> Tensor:
    """Packed (key, index) of all blocks of ``size`` tokens of a row: int64 ``[R, ceil(V / size)]``."""
    x, _ = logit_blocks(logits, vocab_size, size)
    return number(order_key(x).amax(-1))


def child_blocks(keys: Tensor, parents: Tensor, *, ratio: int, size: int) -> Tensor:
    """Packed (key, index) of the blocks inside the parents, int64 ``[R, C * ratio]``, from maxima of the first pass."""
    # keys are the n block maxima of the first pass; a smaller block has size of them, a larger one, a parent, ratio
    # smaller ones.
    index = children(parents, ratio)
    stored = index[:, :, None] * size + torch.arange(size, device=keys.device)
    inside = stored < keys.shape[1]
    stored_keys = keys.gather(1, stored.clamp(max=keys.shape[1] - 1).flatten(1)).view(stored.shape)
    return pack(torch.where(inside, stored_keys, MASKED_KEY).amax(-1), index.to(torch.int32))


def child_tokens(logits: AnyLogits, parents: Tensor, *, vocab_size: int, ratio: int, size: int) -> Tensor:
    """Packed (key, index) of the ``ratio`` blocks of ``size`` tokens inside each parent, int64 ``[R, C * ratio]``."""
    index = children(parents, ratio)
    tokens = index[:, :, None] * size + torch.arange(size, device=parents.device)
    keys = order_key(gather_logits(logits, tokens, vocab_size)).amax(-1)
    return pack(keys, index.to(torch.int32))


def children(parents: Tensor, ratio: int) -> Tensor:
    """Indices of the ``ratio`` blocks inside each parent: packed keys ``[R, C]`` to int64 ``[R, C * ratio]``."""
    first = packed_id(parents) * ratio
    return (first[:, :, None] + torch.arange(ratio, device=parents.device)).flatten(1)


def choose_blocks(keys: Tensor, *, ratio: int, count: int) -> Tensor:
    """The first ``count`` of the n blocks that ``all_coarser`` finds: int64 packed ``[R, min(count, n)]``."""
    keys = F.pad(keys, (0, -keys.shape[1] % ratio), value=MASKED_KEY)
    parts = keys.view(keys.shape[0], keys.shape[1] // ratio, ratio).unbind(2)
    return _chosen(number(reduce(torch.maximum, parts)), count)


def choose_child_blocks(keys: Tensor, parents: Tensor, *, ratio: int, size: int, count: int) -> Tensor:
    """The first ``count`` of the blocks that ``child_blocks`` finds: int64 packed ``[R, min(count, n)]``."""
    index = children(parents, ratio)
    parts = [index * size + offset for offset in range(size)]
    part_keys = [keys.gather(1, part.clamp(max=keys.shape[1] - 1)) for part in parts]
    inside = [torch.where(part < keys.shape[1], key, MASKED_KEY) for part, key in zip(parts, part_keys, strict=True)]
    return _chosen(pack(reduce(torch.maximum, inside), index.to(torch.int32)), count)


def choose_child_tokens(
    logits: AnyLogits, parents: Tensor, *, vocab_size: int, ratio: int, size: int, count: int
) -> Tensor:
    """The first ``count`` of the blocks that ``child_tokens`` finds: int64 packed ``[R, min(count, n)]``."""
    index = children(parents, ratio)
    parts = [visible(gather_logits(logits, index * size + offset, vocab_size)) for offset in range(size)]
    return _chosen(pack(order_key(reduce(torch.maximum, parts)), index.to(torch.int32)), count)


def _chosen(packed: Tensor, count: int) -> Tensor:
    return choose(packed, count=count) if count < packed.shape[1] else packed
