"""The race of many rows on a GPU, in two looks: a bound of every token's score, then the scores where it may matter.

A bound takes less than half of a score's instructions. The winner's block is one of those whose bound reaches the best
score that is seen, and these are few: one in nine rows of ten, up to four in all but one of thousands. So the second
look is at the four with the largest bounds. A row in which a fifth may hold the winner races over all its tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import NoiseKeys, Rows
from compiled_sampler.blocks import gather_logits, logit_blocks, widened
from compiled_sampler.draw import admitted_key
from compiled_sampler.mass import scaled_logits
from compiled_sampler.maxima import best_bits
from compiled_sampler.noise import gumbel_bound
from compiled_sampler.order import (
    MASKED_KEY,
    POSITIVE_INFINITY_KEY,
    float_key,
    indices,
    pack,
    packed_id,
    packed_key,
)
from compiled_sampler.rows import expand_to

LEADERS = 4
"""Blocks of a row that the second look is at."""


class Leaders(NamedTuple):
    """What the second look finds."""

    best: Tensor
    """int64 ``[R]``, the best packed (score key, id) of the blocks with the largest bounds."""
    magnitude: Tensor
    """int32 ``[R]``, the ``nan_bits`` of the row."""
    unsettled: Tensor
    """bool ``[R]``, true where another block may hold the winner."""


def race_bounds(logits: Tensor, rows: Rows, row_max: Tensor | None, *, vocab_size: int, block: int) -> Tensor:
    """A bound of the best score of each block of a row, as its key: int32 ``[R, B]``.

    Score and bound are the same sum of a noise and its bound, and rounding keeps their order. Of a greedy row it is the
    score; of ``+inf`` it is ``POSITIVE_INFINITY_KEY``, whatever decides among those. Nothing is masked: a masked token
    has the bound of a score of ``-inf``. A NaN makes a key above all others, as CUDA's arithmetic makes it positive.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        rows: per-row parameters ``[R]``.
        row_max: float32 ``[R]``, the largest logit, for min_p; None applies no min_p.
        vocab_size: V.
        block: tokens a block.
    """
    x, ids = logit_blocks(logits, vocab_size, block)
    random = expand_to((rows.noise_mask & 1).to(torch.float32), x)
    scale = expand_to(rows.scale, x)
    bounds = x * scale + gumbel_bound(NoiseKeys(*(expand_to(key, x) for key in rows.keys)), ids) * random
    if row_max is not None:
        is_dropped = scaled_logits(x, expand_to(row_max, x), scale) < expand_to(rows.min_p_log2, x)
        bounds = torch.where(is_dropped, float("-inf"), bounds)
    return float_key(best_bits(bounds.view(torch.int32)).view(torch.float32))


def race_leaders(
    logits: Tensor,
    bounds: Tensor,
    rows: Rows,
    row_max: Tensor | None,
    *,
    vocab_size: int,
    block: int,
) -> Leaders:
    """The scores of the blocks with the largest bounds.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        bounds: int32 ``[R, B]``, the ``race_bounds``.
        rows: per-row parameters ``[R]``.
        row_max: float32 ``[R]``, the largest logit, for min_p; None applies no min_p.
        vocab_size: V.
        block: tokens a block.
    """
    keys = widened(bounds, LEADERS * block)
    leaders, rest = _largest(pack(keys, indices(keys.shape[1], keys.device)))
    offset = torch.arange(keys.shape[1], device=keys.device)
    leader = leaders[0]
    for number in range(1, LEADERS):
        leader = torch.where(offset >= number * block, leaders[number], leader)
    ids = packed_id(leader) * block + offset % block
    x = gather_logits(logits, ids, vocab_size)
    x = torch.where(offset < LEADERS * block, x, float("-inf"))
    ids = ids.to(torch.int32)
    best = pack(admitted_key(x, ids, rows, row_max, None), ids).amax(-1)
    best_key, others = packed_key(best).clamp(max=POSITIVE_INFINITY_KEY), packed_key(rest)
    may_win = (others > best_key) | ((others == best_key) & (rows.noise_mask != 0))  # a greedy row's bounds are scores
    unsettled = rows.live & may_win & (others > MASKED_KEY)
    return Leaders(best, packed_key(leaders[0][:, 0]), unsettled)


def _largest(packed: Tensor) -> tuple[list[Tensor], Tensor]:
    """The ``LEADERS`` largest numbers of each row, int64 ``[R, 1]`` each, and the next, ``[R]``; they are distinct.

    One after the other: in a kernel that holds the row in registers each takes less than a sort would.
    """
    found = [packed.amax(-1, keepdim=True)]
    for _ in range(LEADERS):
        packed = torch.where(packed < found[-1], packed, torch.iinfo(torch.int64).min)
        found.append(packed.amax(-1, keepdim=True))
    return found[:LEADERS], found[LEADERS][:, 0]
