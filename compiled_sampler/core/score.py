"""The score of a token in the race, and the mask of the tokens that pass the filters of their row."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.mass import scaled_logits
from compiled_sampler.core.noise import NoiseKeys, gumbel
from compiled_sampler.core.order import (
    MASKED_BITS,
    POSITIVE_INFINITY_KEY,
    Last,
    is_visible,
    logit_bits,
    reaches,
    score_order,
)
from compiled_sampler.core.rows import RowParams, expand_to

_BITS_OF_128 = 0x43000000  # bits of the exponent of all numbers in [128, 256), where G + 192 lies


def score_bits(x: Tensor, ids: Tensor, rows: RowParams, *, by_key: bool = False) -> Tensor:
    """Int32 bits of race scores, compared by ``score_order``; undefined for logits ``-inf`` and NaN."""
    bits = raced_bits(x * expand_to(rows.scale, x), drawn_noise(rows, ids, x))
    return in_any_mode(bits, x, rows) if by_key else bits


def in_any_mode(bits: Tensor, x: Tensor, rows: RowParams) -> Tensor:
    """Scores, int32 bits from ``raced_bits``, that race alike where float operations may take denormals for zeros."""
    # Noise is 0 or at least ``2**-24`` in size, and added to the latter, what a mode may take for zero changes no sum.
    # Noise of 0 has one token in some ``2**24``; ``docs/limits.md`` says what two of them may do. A greedy request has
    # none at all: its logits are its scores, and their bits are taken as they are.
    return torch.where(expand_to(rows.noise_mask, x) == 0, logit_bits(x), bits)


def raced_bits(t: Tensor, noise: Tensor) -> Tensor:
    """Int32 bits of the scores ``t + noise`` of tokens whose weights have the base-2 logarithms ``t``."""
    # No score is ``-0.0``: noise never is, and masked noise is ``+0.0``. A score of ``+inf`` has no room for noise, so
    # the ``+inf`` tokens race on the mantissa of ``G + 192``, above all finite scores.
    score = t + noise
    infinite = (noise + 192.0).view(torch.int32) + (POSITIVE_INFINITY_KEY - _BITS_OF_128)
    return torch.where(score == float("inf"), infinite, score.view(torch.int32))


def score_key(x: Tensor, ids: Tensor, rows: RowParams) -> Tensor:
    """Int32 keys in the order of scores; ``MASKED_KEY`` for logits ``-inf`` and NaN. Arguments as ``score_bits``."""
    return admitted_key(x, ids, rows, None, None)


def noise_of(rows: RowParams, ids: Tensor, like: Tensor) -> Tensor:
    """Gumbel noise of each token, float32 with the shape of ``like`` ``[R, ...]``; greedy requests get noise too."""
    return gumbel(NoiseKeys(*(expand_to(key, like) for key in rows.keys)), ids)


def drawn_noise(rows: RowParams, ids: Tensor, like: Tensor) -> Tensor:
    """``noise_of`` for requests that draw, ``+0.0`` for greedy requests."""
    return (noise_of(rows, ids, like).view(torch.int32) & expand_to(rows.noise_mask, like)).view(torch.float32)


def admitted(x: Tensor, ids: Tensor, rows: RowParams, row_max: Tensor | None, last: Last | None) -> Tensor:
    """Mask of the tokens that can be drawn and pass the row's filters: bool; arguments as ``admitted_bits``."""
    keep = is_visible(x)
    if row_max is not None:
        t = scaled_logits(x, expand_to(row_max, x), expand_to(rows.scale, x))
        keep = keep & (t >= expand_to(rows.min_p_log2, x))
    if last is not None:
        keep = keep & reaches(x, ids, Last(*(expand_to(part, x) for part in last)))
    return keep


def admitted_bits(
    x: Tensor, ids: Tensor, rows: RowParams, row_max: Tensor | None, last: Last | None, *, by_key: bool = False
) -> Tensor:
    """``score_bits`` of the tokens that pass the row's filters, ``MASKED_BITS`` of the others: int32."""
    # row_max None applies no min_p; last is the last token that top-k and top-p keep, and None applies neither.
    return torch.where(admitted(x, ids, rows, row_max, last), score_bits(x, ids, rows, by_key=by_key), MASKED_BITS)


def admitted_key(
    x: Tensor, ids: Tensor, rows: RowParams, row_max: Tensor | None, last: Last | None, *, by_key: bool = False
) -> Tensor:
    """``score_key`` of tokens that pass the row's filters, ``MASKED_KEY`` of the others; as ``admitted_bits``."""
    return score_order(admitted_bits(x, ids, rows, row_max, last, by_key=by_key))
