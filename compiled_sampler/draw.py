"""The draw: an exponential race over the kept tokens, ``argmax(x * c + G)``, ties to the lowest id.

A score is one float32 product and one sum. Its two roundings move it by at most what one ulp of the scaled logit would,
``2**-23 * |x * c|``, so the law of a row with ``|x * c| <= 64`` moves by a total variation below 6e-6, and in
proportion for other magnitudes; shifting a row's logits towards 0 makes it smaller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.batch import BlockMaxima, Entries, NoiseKeys, Rows, RowStatus, SampleOutputs
from compiled_sampler.blocks import best_block, best_named, first_token, logit_slices, widened
from compiled_sampler.filters import keep_candidates
from compiled_sampler.mass import scaled_logits
from compiled_sampler.maxima import best_bits, first_of, largest_magnitude, nan_bits
from compiled_sampler.noise import gumbel
from compiled_sampler.order import (
    MASKED_BITS,
    MASKED_KEY,
    POSITIVE_INFINITY_KEY,
    Last,
    is_visible,
    key_float,
    pack,
    packed_id,
    packed_key,
    reaches,
    score_order,
)
from compiled_sampler.ranking import sort
from compiled_sampler.rows import expand_to, gather_rows

_BITS_OF_128 = 0x43000000  # exponent of all numbers in [128, 256), where G + 192 lies
_SLICE = 128  # tokens that a warp of a GPU loads at once: it then reduces blocks of its own, several warps a program


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


def race_maxima(
    logits: Tensor,
    rows: Rows,
    row_max: Tensor | None,
    last: Last | None,
    *,
    vocab_size: int,
    block: int,
    names: bool = False,
) -> BlockMaxima:
    """The best score of each block of a row; arguments as ``admitted_key`` and ``order_maxima``."""
    slices = logit_slices(logits, vocab_size, block, _SLICE)
    bits = [admitted_bits(*part, rows, row_max, last) for part in slices]
    best = best_bits(*bits)
    found = first_of(bits, best, slices[0].ids) if names else None
    return BlockMaxima(score_order(best), nan_bits(*(x for x, _ in slices)), found)


def draw_from_blocks(
    logits: Tensor,
    blocks: BlockMaxima,
    rows: Rows,
    row_max: Tensor | None,
    last: Last | None,
    *,
    vocab_size: int,
    block: int,
) -> SampleOutputs:
    """The winner of the race, by a second look at the block with the best score where blocks do not name theirs.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        blocks: the ``race_maxima``.
        rows: as in ``admitted_key``, like ``row_max`` and ``last``.
        row_max: None applies no min_p.
        last: None keeps all.
        vocab_size: V.
        block: tokens a block.
    """
    if blocks.token_ids is not None:
        return outputs(*best_named(blocks), rows.live)
    x, ids = best_block(logits, blocks.keys, vocab_size, block)
    key = admitted_key(x, ids, rows, row_max, last)
    return outputs(pack(key, ids).amax(-1), widened(blocks.magnitudes, block).amax(-1), rows.live)


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
    first, magnitude = first_token(logits, blocks, vocab_size, block)
    return outputs(first, magnitude, slots >= 0)


def draw_from_candidates(
    ordered: Tensor, magnitudes: Tensor, entries: Entries, row_mass: Tensor | None, *, stream: int
) -> SampleOutputs:
    """The winner of the race among the candidates that pass the filters, for rows with ``top_k <= C``.

    Args:
        ordered: int64 ``[R, C]``, packed (order key, id) of the first C tokens in descending order.
        magnitudes: int32 ``[R, B]``, ``nan_bits`` of its parts.
        entries: ``[R]``.
        row_mass: int64 ``[R]``, the base of top-p; None takes the mass after top-k.
        stream: of the noise.
    """
    rows = gather_rows(entries, stream=stream)
    keep = keep_candidates(ordered, rows, row_mass)
    ids = packed_id(ordered).to(torch.int32)
    key = score_key(key_float(packed_key(ordered)), ids, rows)
    best = pack(torch.where(keep, key, MASKED_KEY), ids).amax(-1)
    return outputs(best, largest_magnitude(magnitudes, ordered.shape[1]), rows.live)


def draw_from_chosen(
    chosen: Tensor, magnitudes: Tensor, entries: Entries, row_mass: Tensor | None, *, stream: int
) -> SampleOutputs:
    """``draw_from_candidates`` of tokens in any order, ``chosen`` int64 ``[R, C]``; other arguments as there."""
    ordered = sort(chosen, count=chosen.shape[1])
    return draw_from_candidates(ordered, magnitudes, entries, row_mass, stream=stream)


def outputs(best: Tensor, magnitude: Tensor, live: Tensor) -> SampleOutputs:
    """Tokens and status from the best packed key of each row.

    Args:
        best: int64 ``[R]``, the largest packed (score key, id).
        magnitude: int32 ``[R]``, its ``nan_bits``.
        live: bool ``[R]``.
    """
    return outputs_of(packed_key(best), packed_id(best), magnitude, live)


def outputs_of(key: Tensor, ids: Tensor, magnitude: Tensor, live: Tensor) -> SampleOutputs:
    """``outputs`` of the winners' keys and ids ``[R]``."""
    masked = key == MASKED_KEY
    token_ids = torch.where(live & ~masked, ids, -1)
    status = (
        torch.where(magnitude > POSITIVE_INFINITY_KEY, int(RowStatus.NAN_SEEN), 0)
        | torch.where(masked, int(RowStatus.ALL_MASKED), 0)
        | torch.where(key >= POSITIVE_INFINITY_KEY, int(RowStatus.POSITIVE_INFINITY), 0)
    )
    return SampleOutputs(token_ids, torch.where(live, status, -1).to(torch.int32))
