"""The race of large batches on a GPU in two passes: upper bounds of all scores, then the scores that may win.

A bound takes less than half of a score's instructions. The winner is in a block whose bound reaches the best score that
is computed, and such blocks are few: one in nine rows of ten, up to four in all but one of thousands of rows. So the
second pass computes the scores of the four blocks with the largest bounds. A row in which a fifth block may hold the
winner races over all its tokens.

min_p is relative to the row's largest logit, which a pass over the row knows only at its end. So a block's bound covers
all its tokens, and the second pass leaves out blocks whose largest logit min_p drops. A bound may still be that of a
token which min_p drops: hardly ever for rows of language models, but for normally distributed logits, of which min_p
0.05 keeps a sixth of the mass, one row in four races over all its tokens.

Masks that stand beside the logits are applied by every pass. The first one cuts its blocks in slices of one word then:
to choose among the 16 words of a block takes 14 instructions a token and between two of them 5, but one is no choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import SampleOutputs
from compiled_sampler.core.mass import scaled_logits
from compiled_sampler.core.noise import NoiseKeys, gumbel_bound
from compiled_sampler.core.order import (
    MASKED_KEY,
    POSITIVE_INFINITY_KEY,
    float_key,
    indices,
    key_float,
    order_key,
    pack,
    packed_id,
    packed_key,
    visible,
)
from compiled_sampler.core.rows import RowParams, expand_to
from compiled_sampler.core.score import admitted_key
from compiled_sampler.core.stage import holds
from compiled_sampler.passes.blocks import AnyLogits, Slice, gather_logits, logit_blocks, logit_slices, widened
from compiled_sampler.passes.maxima import best_bits, largest_logit
from compiled_sampler.passes.race import tokens_from_packed

LEADERS = 4
"""Blocks of a row whose scores the second pass computes."""
_MASKED_SLICE = 32  # tokens of a slice where masks are read: the bits of a word


class Bounds(NamedTuple):
    """Results of the first pass, for each block of a row."""

    scores: Tensor
    """int32 ``[R, B]``, a key that no score key of the block exceeds."""
    logits: Tensor | None
    """int32 ``[R, B]``, the largest order key of the block; None where nothing is relative to that of the row."""


class Leaders(NamedTuple):
    """Results of the second pass, for each row."""

    best: Tensor
    """int64 ``[R]``, the best packed (score key, id) in the blocks with the largest bounds."""
    nan_bits: Tensor
    """int32 ``[R]``, the ``nan_bits`` of the row."""
    needs_race: Tensor
    """bool ``[R]``, true if another block may hold the winner, so that the whole row must race."""
    row_max: Tensor | None
    """float32 ``[R]``, the largest logit; None where the bounds do not tell those of blocks."""


@holds(tokens=True)
def race_bounds(logits: Tensor, rows: RowParams, *, vocab_size: int, block: int, finds_max: bool) -> Bounds:
    """An upper bound of the best score of each block, int32 keys ``[R, B]``, and if asked for the largest logit."""
    # Score and bound are the same sum, of the noise and of its bound, and rounding keeps their order. The bound of a
    # greedy row is the score; the bound of +inf is POSITIVE_INFINITY_KEY, whichever of the +inf tokens wins. No token
    # is masked: a masked token has the bound of a score of -inf. A NaN gives a key above all others, as CUDA's
    # arithmetic gives a NaN a positive sign.
    # The largest logits are for min_p, and for logprobs, whose masses are relative to that of the row.
    return _bounds([Slice(*logit_blocks(logits, vocab_size, block))], rows, finds_max)


@holds(tokens=True)
def race_masked_bounds(logits: AnyLogits, rows: RowParams, *, vocab_size: int, block: int, finds_max: bool) -> Bounds:
    """``race_bounds`` of logits with masks beside them."""
    return _bounds(logit_slices(logits, vocab_size, block, max(1, block // _MASKED_SLICE)), rows, finds_max)


@holds(blocks=LEADERS)
def race_leaders(logits: AnyLogits, bounds: Bounds, rows: RowParams, *, vocab_size: int, block: int) -> Leaders:
    """The best score of each row in its blocks with the largest bounds, and flags of rows that need a full race."""
    # Blocks in which min_p drops every token are left out.
    keys, row_max = _admitted(bounds, rows, LEADERS * block)
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
    top_key = packed_key(leaders[0])[:, 0]  # above POSITIVE_INFINITY_KEY just where the row has a NaN: its nan_bits
    # a greedy row's bounds are scores, and of equal ones the first block leads, but behind all blocks with a NaN
    decides_ties = (rows.noise_mask == 0) & (top_key <= POSITIVE_INFINITY_KEY)
    may_win = (others > best_key) | ((others == best_key) & ~decides_ties)
    return Leaders(best, top_key, rows.live & may_win & (others > MASKED_KEY), row_max)


def _bounds(slices: Sequence[Slice], rows: RowParams, finds_max: bool) -> Bounds:
    token_bounds = [_token_bounds(x, ids, rows) for x, ids in slices]
    return Bounds(
        float_key(_best_float(token_bounds)),
        order_key(_best_float([visible(x) for x, _ in slices])) if finds_max else None,
    )


def _token_bounds(x: Tensor, ids: Tensor, rows: RowParams) -> Tensor:
    """An upper bound of each token's score, float32 ``[R, B, n]``, of logits and their int32 ids ``[B, n]``."""
    keys = NoiseKeys(*(expand_to(key, x) for key in rows.keys))
    noise = gumbel_bound(keys, ids, expand_to((rows.noise_mask & 1).to(torch.float32), x))
    return x * expand_to(rows.scale, x) + noise


def _admitted(bounds: Bounds, rows: RowParams, width: int) -> tuple[Tensor, Tensor | None]:
    """Bounds of ``width`` blocks at least, ``MASKED_KEY`` where min_p drops all; the row's largest logit or None."""
    # A block with a NaN keeps its key, from which the NaN in the row is known.
    scores = widened(bounds.scores, width)
    if bounds.logits is None:
        return scores, None
    keys = widened(bounds.logits, width)
    row_max = largest_logit(keys)
    t = scaled_logits(key_float(keys), row_max[:, None], rows.scale[:, None])
    admitted = (t >= rows.min_p_log2[:, None]) | (scores > POSITIVE_INFINITY_KEY)
    return torch.where(admitted, scores, MASKED_KEY), row_max


def _best_float(slices: Sequence[Tensor]) -> Tensor:
    """The largest float32 of each block in slices, compared as integers: a NaN with a positive sign is above all."""
    return best_bits(*(values.view(torch.int32) for values in slices)).view(torch.float32)


def _largest(packed: Tensor) -> tuple[list[Tensor], Tensor]:
    """The ``LEADERS`` largest numbers of each row, int64 ``[R, 1]`` each, and the next, ``[R]``; all are distinct."""
    # They are found one after the other: in a kernel that holds the row in registers each takes less than a sort would.
    descending = [packed.amax(-1, keepdim=True)]
    for _ in range(LEADERS):
        packed = torch.where(packed < descending[-1], packed, torch.iinfo(torch.int64).min)
        descending.append(packed.amax(-1, keepdim=True))
    return descending[:LEADERS], descending[LEADERS][:, 0]


def draw_from_leaders(leaders: Leaders, winners: Tensor, idle: Tensor) -> SampleOutputs:
    """The better of the leaders and the ``winners``, int64 ``[R, n]``, of rows that raced over all their tokens."""
    return tokens_from_packed(torch.maximum(leaders.best, winners.amax(-1)), leaders.nan_bits, idle)
