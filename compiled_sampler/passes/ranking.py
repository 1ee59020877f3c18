"""The largest of a row's packed keys: of a few hundred in three ways on a GPU, of thousands by numpy on the CPU.

For few rows, keys are ranked by counting and placed by their rank: two kernels that are as wide as the GPU. For more
rows, one kernel finds the set of the largest keys bit by bit, in a third of the instructions of a sort. A sort is used
for the last few keys and their order. On the CPU, numpy's selections and sorts of integers use vector instructions: the
first 64 of 4,096 keys take 30 us for 8 rows, by torch 70.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.core.order import MASKED_KEY, packed_key

MOST_CHOSEN = 1023
"""Most keys per row that ``choose`` accepts: a count of them has ten bits."""

_NOTHING = -(2**63)
_TEN_BITS = 2**10 - 1
_ONE, _TWO, _THREE = 1, 1 + 2**10, 1 + 2**10 + 2**20  # three counts of ten bits: for a key that reaches 1, 2, 3 pivots


def sort(packed: Tensor, *, count: int) -> Tensor:
    """The ``count`` largest packed keys in descending order: int64 ``[R, n]`` to ``[R, count]``."""
    width = _width(packed)
    packed = F.pad(packed, (0, width - packed.shape[1]), value=_NOTHING) if width > packed.shape[1] else packed
    return packed.sort(-1, descending=True).values[:, :count]


def rank(packed: Tensor) -> Tensor:
    """The number of larger keys in the row, int32 ``[R, n]``, for each of the distinct int64 ``packed`` ``[R, n]``."""
    return (packed[:, None, :] > packed[:, :, None]).sum(-1, dtype=torch.int32)


def place(packed: Tensor, ranks: Tensor, *, count: int) -> Tensor:
    """The ``count`` largest packed keys in descending order: int64 ``[R, count]``.

    Args:
        packed: int64 ``[R, n]``, distinct in a row.
        ranks: int32 ``[R, n]``, the ranks of ``packed``.
        count: at most n.
    """
    ordered = packed.new_empty((packed.shape[0], _width(packed)))
    return ordered.index_put((_row_of(packed), ranks.to(torch.int64)), packed)[:, :count]


def choose(packed: Tensor, *, count: int) -> Tensor:
    """The ``count`` largest packed keys in the order of the input: int64 ``[R, n]`` to ``[R, count]``.

    Among equal keys the first in the input are the largest packed keys, because ids ascend.

    Args:
        packed: int64 ``[R, n]``, ids ascending in a row; n at most ``MOST_CHOSEN``.
        count: at most n.
    """
    keys = packed_key(packed)
    least = _least_of_the_largest(keys, count)
    above, tied = (keys > least).to(torch.int32), (keys == least).to(torch.int32)
    both = above + (tied << 16)  # two counts in one
    before = both.cumsum(-1, dtype=torch.int32) - both
    above_before, tied_before = before & 0xFFFF, before >> 16
    room = count - above.sum(-1, keepdim=True, dtype=torch.int32)
    is_chosen = (above > 0) | ((tied > 0) & (tied_before < room))
    within = (above_before + torch.minimum(tied_before, room)).to(torch.int64)
    beyond = count + torch.arange(packed.shape[1], device=packed.device)  # distinct places for all other keys
    chosen = packed.new_empty((packed.shape[0], count + packed.shape[1]))
    return chosen.index_put((_row_of(packed), torch.where(is_chosen, within, beyond)), packed)[:, :count]


def _least_of_the_largest(keys: Tensor, count: int) -> Tensor:
    """The smallest of the ``count`` largest keys: int32 ``[R, n]`` to ``[R, 1]``.

    It is the largest number that at least ``count`` keys reach. Its bits are found two at a time, by counting the keys
    that reach each of three pivots: one reduction for three counts, because each step waits for the step before.
    """
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
    """The power of two that a row of keys is padded to.

    Inductor sorts powers of two; ``place`` uses the same width, so that the stages that follow are the same for both.
    """
    return int(1 << (packed.shape[1] - 1).bit_length())


def largest(keys: Tensor, count: int) -> Tensor:
    """The ``count`` largest keys in descending order: integers ``[R, n]`` on the CPU to ``[R, count]``."""
    found = np.partition(keys.numpy(), -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(found, axis=-1)[:, ::-1].copy())


def select(packed: Tensor, *, count: int) -> Tensor:
    """``largest`` as a stage: int64 ``[R, n]`` to ``[R, count]``."""
    selected: Tensor = torch.ops.compiled_sampler.cpu_select(packed, count)
    return selected


def _unfilled(packed: Tensor, count: int) -> Tensor:
    return packed.new_empty((packed.shape[0], count))


torch.library.define("compiled_sampler::cpu_select", "(Tensor packed, int count) -> Tensor")
torch.library.impl("compiled_sampler::cpu_select", "cpu", largest)  # a custom_op costs 10 to 20 us more per call
torch.library.register_fake("compiled_sampler::cpu_select", _unfilled)
