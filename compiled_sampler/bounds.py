"""The race of many rows on a GPU, in two looks: a bound of every token's score, then the scores where it may matter.

A bound takes less than half of a score's instructions. The winner's block is one of those whose bound reaches the best
score that is seen, and these are few: one in nine rows of ten, up to four in all but one of thousands. So the second
look is at the four with the largest bounds. A row in which a fifth may hold the winner races over all its tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import BlockMaxima, NoiseKeys, Rows
from compiled_sampler.blocks import gather_logits, logit_blocks, nan_bits, widened
from compiled_sampler.draw import admitted_key, best_bits, passes_min_p, unless_greedy
from compiled_sampler.noise import gumbel_bound
from compiled_sampler.order import (
    MASKED_BITS,
    MASKED_KEY,
    POSITIVE_INFINITY_KEY,
    indices,
    pack,
    packed_id,
    packed_key,
    score_order,
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


def race_bounds(logits: Tensor, rows: Rows, row_max: Tensor | None, *, vocab_size: int, block: int) -> BlockMaxima:
    """A bound of the best score of each block of a row, as its key; arguments as ``draw.race_maxima``.

    Where noise is masked off it is the score. A score of ``+inf`` has that bound, whatever decides among those.
    """
    x, ids = logit_blocks(logits, vocab_size, block)
    noise = unless_greedy(gumbel_bound(NoiseKeys(*(expand_to(key, x) for key in rows.keys)), ids), rows)
    bounds = x * expand_to(rows.scale, x) + noise
    bits = torch.where(passes_min_p(x, rows, row_max), bounds.view(torch.int32), MASKED_BITS)
    return BlockMaxima(score_order(best_bits(bits)), nan_bits(x), None)


def race_leaders(
    logits: Tensor,
    bounds: BlockMaxima,
    rows: Rows,
    row_max: Tensor | None,
    *,
    vocab_size: int,
    block: int,
) -> Leaders:
    """The scores of the blocks with the largest bounds.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        bounds: the ``race_bounds``.
        rows: per-row parameters ``[R]``.
        row_max: float32 ``[R]``, the largest logit, for min_p; None applies no min_p.
        vocab_size: V.
        block: tokens a block.
    """
    keys = widened(bounds.keys, LEADERS * block)
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
    reached = packed_key(rest) >= packed_key(best).clamp(min=MASKED_KEY + 1, max=POSITIVE_INFINITY_KEY)
    magnitude = widened(bounds.magnitudes, LEADERS * block).amax(-1)
    magnitude = torch.where(rows.live, magnitude, 0)  # what reads the rows is one kernel
    return Leaders(best, magnitude, rows.live & (rows.noise_mask != 0) & reached)


def _largest(packed: Tensor) -> tuple[list[Tensor], Tensor]:
    """The ``LEADERS`` largest numbers of each row, int64 ``[R, 1]`` each, and the next, ``[R]``; they are distinct.

    One after the other: in a kernel that holds the row in registers each takes less than a sort would.
    """
    found = [packed.amax(-1, keepdim=True)]
    for _ in range(LEADERS):
        packed = torch.where(packed < found[-1], packed, torch.iinfo(torch.int64).min)
        found.append(packed.amax(-1, keepdim=True))
    return found[:LEADERS], found[LEADERS][:, 0]
