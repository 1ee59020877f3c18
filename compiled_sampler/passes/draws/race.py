"""The draw: an exponential race over the kept tokens, ``argmax(x * c + G)``, ties to the lowest id.

A score is one float32 product and one sum. The two roundings move it by at most one ulp of the scaled logit, ``2**-23 *
|x * c|``, so the law of a row with ``|x * c| <= 64`` moves by a total variation below 6e-6, and in proportion for other
magnitudes; shifting a row's logits towards 0 makes it smaller.
"""

from __future__ import annotations

from torch import Tensor

from compiled_sampler.batch import SampleOutputs
from compiled_sampler.core.order import Last, pack, score_order
from compiled_sampler.core.rows import RowParams, RowSlots, idle_status
from compiled_sampler.core.score import admitted_bits, admitted_key
from compiled_sampler.passes.blocks import AnyLogits, logit_slices, widened
from compiled_sampler.passes.maxima import (
    BlockMaxima,
    best_bits,
    best_block,
    best_named,
    first_of,
    first_token,
    nan_bits,
)
from compiled_sampler.passes.tokens import tokens_from_packed


def race_maxima(
    logits: AnyLogits,
    rows: RowParams,
    row_max: Tensor | None,
    last: Last | None,
    *,
    vocab_size: int,
    block: int,
    slices: int = 1,
    by_bits: bool = False,
    names: bool = False,
) -> BlockMaxima:
    """The best score key of each block of a row, int32 ``[R, B]``, with ``nan_bits`` and, if ``names``, token ids.

    Arguments as ``score.admitted_key`` and ``maxima.order_maxima``.
    """
    parts = logit_slices(logits, vocab_size, block, slices)
    bits = [admitted_bits(*part, rows, row_max, last, by_key=not by_bits) for part in parts]
    best = best_bits(*bits)
    found = first_of(bits, best, parts[0].ids) if names else None
    return BlockMaxima(score_order(best), nan_bits(*(x for x, _ in parts), by_bits=by_bits), found)


def draw_from_blocks(
    logits: AnyLogits,
    blocks: BlockMaxima,
    rows: RowParams,
    row_max: Tensor | None,
    last: Last | None,
    *,
    vocab_size: int,
    block: int,
    by_bits: bool = False,
) -> SampleOutputs:
    """The winner of the race, ``[R]``; where blocks do not name their tokens, the best block is read again.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        blocks: from ``race_maxima``.
        rows: as in ``admitted_key``, like ``row_max`` and ``last``.
        row_max: None applies no min_p.
        last: None applies neither top-k nor top-p.
        vocab_size: V.
        block: tokens per block.
        by_bits: as in ``race_maxima``.
    """
    if blocks.token_ids is not None:
        return tokens_from_packed(*best_named(blocks), rows.idle)
    x, ids = best_block(logits, blocks.keys, vocab_size, block)
    key = admitted_key(x, ids, rows, row_max, last, by_key=not by_bits)
    return tokens_from_packed(pack(key, ids).amax(-1), widened(blocks.magnitudes, block).amax(-1), rows.idle)


def first_from_blocks(
    logits: AnyLogits, blocks: BlockMaxima, row_slots: RowSlots, *, vocab_size: int, block: int
) -> SampleOutputs:
    """The first token of each row's order, ``[R]``: greedy sampling.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        blocks: from ``order_maxima``.
        row_slots: ``[R]``, the slot and the position of each row.
        vocab_size: V.
        block: tokens per block.
    """
    first, magnitude = first_token(logits, blocks, vocab_size, block)
    return tokens_from_packed(first, magnitude, idle_status(row_slots.table, row_slots.slots))
