"""The draw: an exponential race over the kept tokens, ``argmax(x * c + G)``, ties to the lowest id.

A score is one float32 product and one sum. Its two roundings move it by at most what one ulp of the scaled logit would,
``2**-23 * |x * c|``, so the law of a row with ``|x * c| <= 64`` moves by a total variation below 6e-6, and in
proportion for other magnitudes; shifting a row's logits towards 0 makes it smaller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.batch import BlockMaxima, NoiseKeys, Rows, RowStatus, SampleOutputs
from compiled_sampler.blocks import best_block, logit_blocks
from compiled_sampler.filters import keep_candidates
from compiled_sampler.mass import scaled_logits
from compiled_sampler.noise import gumbel
from compiled_sampler.order import (
    MASKED_KEY,
    POSITIVE_INFINITY_KEY,
    is_visible,
    key_float,
    magnitude_bits,
    order_key,
    pack,
    packed_id,
    packed_key,
    score_order,
)


def score_key(x: Tensor, ids: Tensor, rows: Rows) -> Tensor:
    """Int32 keys ordered as the scores of the race; ``MASKED_KEY`` for ``-inf`` and NaN logits.

    No score is ``-0.0``: noise is not, and where it is masked off it is ``+0.0``. A score of ``+inf`` has no room for
    noise, so those tokens race on the mantissa of ``G + 192`` above all finite keys.

    Args:
        x: float32 ``[R, ...]`` logits.
        ids: int32 token ids, broadcastable to ``x``.
        rows: per-row parameters ``[R]``.
    """
    noise = gumbel(NoiseKeys(*(expand_to(key, x) for key in rows.keys)), ids)
    noise = (noise.view(torch.int32) & expand_to(rows.noise_mask, x)).view(torch.float32)
    score = x * expand_to(rows.scale, x) + noise
    infinite = POSITIVE_INFINITY_KEY | ((noise + 192.0).view(torch.int32) & 0x7FFFFF)
    key = torch.where(score == float("inf"), infinite, score_order(score))
    return torch.where(is_visible(x), key, MASKED_KEY)


def expand_to(per_row: Tensor, like: Tensor) -> Tensor:
    """``[R]`` viewed as ``[R, 1, ...]`` with the dimensions of ``like``."""
    return per_row.view(-1, *(1,) * (like.dim() - 1))


def admitted_key(x: Tensor, ids: Tensor, rows: Rows, row_max: Tensor | None, threshold: Tensor | None) -> Tensor:
    """``score_key`` where a token passes the row's filters, ``MASKED_KEY`` elsewhere.

    Args:
        x: float32 ``[R, ...]`` logits.
        ids: int32 token ids, broadcastable to ``x``.
        rows: per-row parameters ``[R]``.
        row_max: float32 ``[R]``, the largest logit, for min_p; None applies no min_p.
        threshold: int64 ``[R]``, the last packed key that top-k and top-p keep; None keeps all.
    """
    key = score_key(x, ids, rows)
    if row_max is not None:
        t = scaled_logits(x, expand_to(row_max, x), expand_to(rows.scale, x))
        key = torch.where(t >= expand_to(rows.min_p_log2, x), key, MASKED_KEY)
    if threshold is not None:
        key = torch.where(pack(order_key(x), ids) >= expand_to(threshold, x), key, MASKED_KEY)
    return key


def race_maxima(
    logits: Tensor, rows: Rows, row_max: Tensor | None, threshold: Tensor | None, *, vocab_size: int, block: int
) -> BlockMaxima:
    """The best score of each block of a row; arguments as ``admitted_key`` and ``order_maxima``."""
    x, ids = logit_blocks(logits, vocab_size, block)
    key = admitted_key(x, ids, rows, row_max, threshold)
    return BlockMaxima(key.amax(-1), magnitude_bits(x).amax(-1))


def draw_from_blocks(
    logits: Tensor,
    blocks: BlockMaxima,
    rows: Rows,
    row_max: Tensor | None,
    threshold: Tensor | None,
    *,
    vocab_size: int,
    block: int,
) -> SampleOutputs:
    """The winner of the race: a second look at the block with the best score.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        blocks: the ``race_maxima``.
        rows: as in ``admitted_key``, like ``row_max`` and ``threshold``.
        row_max: None applies no min_p.
        threshold: None keeps all.
        vocab_size: V.
        block: tokens a block.
    """
    x, ids = best_block(logits, blocks.keys, vocab_size, block)
    key = admitted_key(x, ids, rows, row_max, threshold)
    return outputs(pack(key, ids).amax(-1), blocks.magnitudes.amax(-1), rows.live)


def first_from_blocks(
    logits: Tensor, blocks: BlockMaxima, slots: Tensor, *, vocab_size: int, block: int
) -> SampleOutputs:
    """The first token of the order: greedy sampling.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        blocks: the ``order_maxima``.
        slots: int64 ``[R]``; -1 for padding.
        vocab_size: V.
        block: tokens a block.
    """
    x, ids = best_block(logits, blocks.keys, vocab_size, block)
    return outputs(pack(order_key(x), ids).amax(-1), blocks.magnitudes.amax(-1), slots >= 0)


def draw_from_candidates(ordered: Tensor, magnitude: Tensor, rows: Rows, masses: Tensor | None) -> SampleOutputs:
    """The winner of the race among the candidates that pass the filters, for rows with ``top_k <= C``.

    Args:
        ordered: int64 ``[R, C]``, packed (order key, id) of the first C tokens in descending order.
        magnitude: int32 ``[R]``, the largest ``magnitude_bits`` of the row.
        rows: per-row parameters ``[R]``.
        masses: int64 ``[R, B]``, parts that add up to the mass of the row, the base of top-p; None takes the mass after
            top-k.
    """
    keep = keep_candidates(ordered, rows, None if masses is None else masses.sum(-1))
    ids = packed_id(ordered).to(torch.int32)
    key = score_key(key_float(packed_key(ordered)), ids, rows)
    return outputs(pack(torch.where(keep, key, MASKED_KEY), ids).amax(-1), magnitude, rows.live)


def outputs(best: Tensor, magnitude: Tensor, live: Tensor) -> SampleOutputs:
    """Tokens and status from the best packed key of each row.

    Args:
        best: int64 ``[R]``, the largest packed (score key, id).
        magnitude: int32 ``[R]``, the largest ``magnitude_bits`` of the row.
        live: bool ``[R]``.
    """
    key = packed_key(best)
    masked = key == MASKED_KEY
    token_ids = torch.where(live & ~masked, packed_id(best), -1)
    status = (
        torch.where(magnitude > POSITIVE_INFINITY_KEY, int(RowStatus.NAN_SEEN), 0)
        | torch.where(masked, int(RowStatus.ALL_MASKED), 0)
        | torch.where(key >= POSITIVE_INFINITY_KEY, int(RowStatus.POSITIVE_INFINITY), 0)
    )
    return SampleOutputs(token_ids, torch.where(live, status, -1).to(torch.int32))
