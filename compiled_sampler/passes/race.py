"""The draw: an exponential race over the kept tokens, ``argmax(x * c + G)``, ties to the lowest id.

A score is one float32 product and one sum. The two roundings move it by at most one ulp of the scaled logit, ``2**-23 *
|x * c|``, so the law of a row with ``|x * c| <= 64`` moves by a total variation below 6e-6, and in proportion for other
magnitudes; shifting a row's logits towards 0 makes it smaller.

A row races over all its tokens or over its candidates; the winners give token ids and status.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import RowStatus, SampleOutputs
from compiled_sampler.core.filters import keep_candidates
from compiled_sampler.core.mass import scaled_logits
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.order import (
    MASKED_KEY,
    POSITIVE_INFINITY_KEY,
    Last,
    indices,
    key_float,
    order_key,
    pack,
    packed_id,
    packed_key,
    row_logits,
    score_order,
)
from compiled_sampler.core.rows import RowParams, RowSlots, expand_to, gather_rows, idle_status
from compiled_sampler.core.score import admitted_bits, admitted_key, score_key
from compiled_sampler.core.stage import holds
from compiled_sampler.passes.blocks import AnyLogits, gather_logits, logit_slices, widened
from compiled_sampler.passes.candidates import sort
from compiled_sampler.passes.kept import Kept, kept_candidates, passes
from compiled_sampler.passes.law import Law
from compiled_sampler.passes.maxima import (
    BlockMaxima,
    best_bits,
    best_block,
    best_named,
    first_of,
    first_token,
    nan_bits_of,
    row_nan_bits,
)


def tokens_from_packed(best: Tensor, nan_bits: Tensor, idle: Tensor) -> SampleOutputs:
    """Token ids, int64, and status, int32, ``[R]`` each, from the best packed key of each row."""
    return tokens_from_keys(packed_key(best), packed_id(best), nan_bits, idle)


def tokens_from_keys(key: Tensor, ids: Tensor, nan_bits: Tensor, idle: Tensor) -> SampleOutputs:
    """Token ids and status ``[R]`` from keys and ids ``[R]`` of the winners; else as ``tokens_from_packed``."""
    masked, live = key == MASKED_KEY, idle == 0
    token_ids = torch.where(live & ~masked, ids, -1)
    status = (
        torch.where(nan_bits > POSITIVE_INFINITY_KEY, int(RowStatus.NAN_SEEN), 0)
        | torch.where(masked, int(RowStatus.ALL_MASKED), 0)
        | torch.where(key >= POSITIVE_INFINITY_KEY, int(RowStatus.POSITIVE_INFINITY), 0)
    )
    return SampleOutputs(token_ids, torch.where(live, status, idle).to(torch.int32))


def last_before_winner(logits: AnyLogits, token_ids: Tensor, *, vocab_size: int) -> Last:
    """A ``Last`` ``[R]`` that exactly the tokens before the given tokens reach: the key of each, and its id less 1."""
    # For id -1, which stands for no token, the result is arbitrary: such a row has no winner under any threshold.
    x = gather_logits(logits, token_ids[:, None], vocab_size)[:, 0]
    return Last(order_key(x), (token_ids - 1).to(torch.int32))


@holds(tokens=True)
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
    """The best score key of each block of a row, int32 ``[R, B]``, with ``nan_bits`` and, if ``names``, token ids."""
    # Arguments as score.admitted_key and maxima.order_maxima.
    parts = logit_slices(logits, vocab_size, block, slices)
    bits = [admitted_bits(*part, rows, row_max, last, by_key=not by_bits) for part in parts]
    best = best_bits(*bits)
    token_ids = first_of(bits, best, parts[0].ids) if names else None
    return BlockMaxima(score_order(best), nan_bits_of(*(x for x, _ in parts), by_bits=by_bits), token_ids)


@holds(blocks=1)
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
    """The winner of the race, ``[R]``; where blocks do not name their tokens, the best block is read again."""
    race = logits, blocks, rows, row_max, last
    best = best_from_blocks(*race, vocab_size=vocab_size, block=block, by_bits=by_bits)
    return tokens_from_packed(*best, rows.idle)


def best_from_blocks(
    logits: AnyLogits,
    blocks: BlockMaxima,
    rows: RowParams,
    row_max: Tensor | None,
    last: Last | None,
    *,
    vocab_size: int,
    block: int,
    by_bits: bool,
) -> tuple[Tensor, Tensor]:
    """The best packed (score key, id) of each row, int64 ``[R]``, and its ``nan_bits``; as ``draw_from_blocks``."""
    if blocks.token_ids is not None:
        return best_named(blocks)
    x, ids = best_block(logits, blocks.keys, vocab_size, block)
    key = admitted_key(x, ids, rows, row_max, last, by_key=not by_bits)
    return pack(key, ids).amax(-1), widened(blocks.nan_bits, block).amax(-1)


@holds(blocks=1)
def first_from_blocks(
    logits: AnyLogits, blocks: BlockMaxima, row_slots: RowSlots, *, vocab_size: int, block: int
) -> SampleOutputs:
    """The first token of each row's order, ``[R]``: greedy sampling."""
    first, nan_bits = first_token(logits, blocks, vocab_size, block)
    return tokens_from_packed(first, nan_bits, idle_status(row_slots.table, row_slots.slots))


def draw_from_candidates(
    ordered: Tensor, nan_bits: Tensor, row_slots: RowSlots, row_mass: Tensor | None, *, stream: int
) -> SampleOutputs:
    """The winner of the race among the candidates that pass the filters, ``[R]``, for rows with ``top_k <= C``."""
    # row_mass is the base of top-p; None takes the mass after top-k.
    rows = gather_rows(row_slots, stream=stream)
    keep = keep_candidates(ordered, rows, row_mass)
    ids = packed_id(ordered).to(torch.int32)
    key = score_key(key_float(packed_key(ordered)), ids, rows)
    best = pack(torch.where(keep, key, MASKED_KEY), ids).amax(-1)
    return tokens_from_packed(best, row_nan_bits(nan_bits, ordered.shape[1]), rows.idle)


def draw_from_unordered_candidates(
    chosen: Tensor, nan_bits: Tensor, row_slots: RowSlots, row_mass: Tensor | None, *, stream: int
) -> SampleOutputs:
    """``draw_from_candidates`` for candidates in any order, ``chosen``, int64 ``[R, C]``; other arguments as there."""
    ordered = sort(chosen, count=chosen.shape[1])
    return draw_from_candidates(ordered, nan_bits, row_slots, row_mass, stream=stream)


def draw_and_keep(
    chosen: Tensor,
    nan_bits: Tensor,
    row_slots: RowSlots,
    row_mass: Tensor | None,
    *,
    stream: int,
    is_ordered: bool,
    by_bits: bool,
) -> tuple[SampleOutputs, Kept, Tensor]:
    """``draw_from_candidates``, the tokens that the filters keep ``[R]``, and the candidates in order, ``[R, C]``."""
    ordered = chosen if is_ordered else sort(chosen, count=chosen.shape[1])
    drawn = draw_from_candidates(ordered, nan_bits, row_slots, row_mass, stream=stream)
    return drawn, kept_candidates(ordered, row_slots, row_mass, by_bits=by_bits), ordered


@holds(tokens=True)
def best_of_race(
    logits: Tensor, law: Law, row_slots: RowSlots, *, vocab_size: int, count: int, stream: int = TARGET
) -> SampleOutputs:
    """The ``count`` best tokens of each row's race, int64 ``[R, count]``; -1 behind the last."""
    # Of a greedy row, which keeps one token, it is the first ones of the order.
    cut = law.cut
    assert cut is not None  # rows are logits
    rows = gather_rows(row_slots, stream=stream)
    x, ids = row_logits(logits, vocab_size), indices(vocab_size, logits.device)
    kept = passes(x, ids, scaled_logits(x, expand_to(cut.row_max, x), expand_to(cut.scale, x)), cut)
    keeps = rows.live[:, None] if kept is None else rows.live[:, None] & (kept | (rows.noise_mask == 0)[:, None])
    best = pack(torch.where(keeps, score_key(x, ids, rows), MASKED_KEY), ids).topk(min(count, vocab_size)).values
    tokens = torch.where(packed_key(best) == MASKED_KEY, -1, packed_id(best).to(torch.int64))
    status = torch.where(tokens[:, 0] < 0, law.status | int(RowStatus.ALL_MASKED), law.status)
    tokens = F.pad(tokens, (0, count - tokens.shape[1]), value=-1)
    return SampleOutputs(tokens, torch.where(rows.live, status, rows.idle))
