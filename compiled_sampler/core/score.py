"""The score of a token in the race, and whether its row's filters admit it."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.mass import scaled_logits
from compiled_sampler.core.noise import NoiseKeys, gumbel
from compiled_sampler.core.order import MASKED_BITS, POSITIVE_INFINITY_KEY, Last, is_visible, reaches, score_order
from compiled_sampler.core.rows import Rows, expand_to

_BITS_OF_128 = 0x43000000  # exponent of all numbers in [128, 256), where G + 192 lies


def score_bits(x: Tensor, ids: Tensor, rows: Rows) -> Tensor:
    """Int32 bits of the scores of the race, to be compared by ``score_order``; of no use for ``-inf`` and NaN.

    Args:
        x: float32 ``[R, ...]`` logits.
        ids: int32 token ids, broadcastable to ``x``.
        rows: per-row parameters ``[R]``.
    """
    return raced_bits(x * expand_to(rows.scale, x), drawn_noise(rows, ids, x))


def raced_bits(t: Tensor, noise: Tensor) -> Tensor:
    """Int32 bits of the scores of tokens with logarithms ``t`` of their weights.

    No score is ``-0.0``: noise is not, and where it is masked off it is ``+0.0``. A score of ``+inf`` has no room for
    noise, so those tokens race on the mantissa of ``G + 192`` above all finite scores.

    Args:
        t: float32 ``[R, ...]``, to base 2.
        noise: float32, the same shape.
    """
    score = t + noise
    infinite = (noise + 192.0).view(torch.int32) + (POSITIVE_INFINITY_KEY - _BITS_OF_128)
    return torch.where(score == float("inf"), infinite, score.view(torch.int32))


def score_key(x: Tensor, ids: Tensor, rows: Rows) -> Tensor:
    """Int32 keys ordered as the scores; ``MASKED_KEY`` for ``-inf`` and NaN. Arguments as ``score_bits``."""
    return admitted_key(x, ids, rows, None, None)


def noise_of(rows: Rows, ids: Tensor, like: Tensor) -> Tensor:
    """The noise of each token, also of greedy requests: float32 with the shape of ``like`` ``[R, ...]``."""
    return gumbel(NoiseKeys(*(expand_to(key, like) for key in rows.keys)), ids)


def drawn_noise(rows: Rows, ids: Tensor, like: Tensor) -> Tensor:
    """``noise_of``, but 0 of greedy requests."""
    return (noise_of(rows, ids, like).view(torch.int32) & expand_to(rows.noise_mask, like)).view(torch.float32)


def admitted(x: Tensor, ids: Tensor, rows: Rows, row_max: Tensor | None, last: Last | None) -> Tensor:
    """True where a token can be drawn and passes the row's filters; as ``admitted_bits``."""
    keep = is_visible(x)
    if row_max is not None:
        t = scaled_logits(x, expand_to(row_max, x), expand_to(rows.scale, x))
        keep = keep & (t >= expand_to(rows.min_p_log2, x))
    if last is not None:
        keep = keep & reaches(x, ids, Last(*(expand_to(each, x) for each in last)))
    return keep


def admitted_bits(x: Tensor, ids: Tensor, rows: Rows, row_max: Tensor | None, last: Last | None) -> Tensor:
    """``score_bits`` where a token passes the row's filters, ``MASKED_BITS`` elsewhere.

    Args:
        x: float32 ``[R, ...]`` logits.
        ids: int32 token ids, broadcastable to ``x``.
        rows: per-row parameters ``[R]``.
        row_max: float32 ``[R]``, the largest logit, for min_p; None applies no min_p.
        last: ``[R]``, the last token that top-k and top-p keep; None keeps all.
    """
    return torch.where(admitted(x, ids, rows, row_max, last), score_bits(x, ids, rows), MASKED_BITS)


def admitted_key(x: Tensor, ids: Tensor, rows: Rows, row_max: Tensor | None, last: Last | None) -> Tensor:
    """``score_key`` where a token passes the row's filters, ``MASKED_KEY`` elsewhere; as ``admitted_bits``."""
    return score_order(admitted_bits(x, ids, rows, row_max, last))
