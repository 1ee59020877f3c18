"""Rows whose columns are split over ranks: what a rank tells the others of its own columns, and the draw from that."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import SampleOutputs
from compiled_sampler.core.filters import KEEP_ALL
from compiled_sampler.core.noise import NoiseKeys
from compiled_sampler.core.order import MASKED_KEY, POSITIVE_INFINITY_KEY, packed_key
from compiled_sampler.core.rows import RowParams, RowSlots, gather_rows, idle_status
from compiled_sampler.edits.allowed_token_ids import AllowedIds
from compiled_sampler.edits.masks import row_words
from compiled_sampler.passes.blocks import AnyLogits
from compiled_sampler.passes.bounds import Leaders
from compiled_sampler.passes.candidates import sort
from compiled_sampler.passes.maxima import BlockMaxima, first_token
from compiled_sampler.passes.race import best_from_blocks, tokens_from_packed


def rows_of_shard(row_slots: RowSlots, *, stream: int, start: int) -> RowParams:
    """``gather_rows`` for columns that begin at token ``start``: column i has the noise of token ``start + i``."""
    rows = gather_rows(row_slots, stream=stream)
    first, second, third, fourth = rows.keys
    # Noise reads an id as ``id * first + second`` alone (core/noise.py), modulo 2**32.
    shifted = NoiseKeys(first, first * start + second, third, fourth)
    live, idle, _, *parameters = rows
    return RowParams(live, idle, shifted, *parameters)


def largest_of_shard(keys: Tensor) -> Tensor:
    """The largest order key of the shard, int32 ``[R, 1]``, from those of its blocks ``[R, B]``."""
    return keys.amax(-1, keepdim=True)


def words_of_shard(
    token_bitmask: Tensor | None,
    slots: Tensor,
    allowed: AllowedIds | None,
    *,
    vocab_size: int,
    start: int,
    width: int,
) -> Tensor:
    """The bits of the shard's tokens in the masks of whole rows, int32 ``[R, ceil(width / 32)]``."""
    words = row_words(token_bitmask, slots, allowed, vocab_size=vocab_size)
    assert words is not None
    (first, shift), count = divmod(start, 32), -(-width // 32)
    if not shift:
        return words[:, first : first + count].clone()
    low, high = (F.pad(words, (0, 2))[:, begin : begin + count] for begin in (first, first + 1))
    return ((low >> shift) & ((1 << (32 - shift)) - 1)) | (high << (32 - shift))


def first_of_shard(logits: AnyLogits, blocks: BlockMaxima, *, vocab_size: int, block: int, start: int) -> Tensor:
    """``told_best`` of greedy rows: the first token of the order."""
    return told_best(*first_token(logits, blocks, vocab_size, block), start)


def winners_of_blocks(
    logits: AnyLogits,
    blocks: BlockMaxima,
    rows: RowParams,
    row_max: Tensor | None,
    *,
    vocab_size: int,
    block: int,
    by_bits: bool,
    start: int,
) -> Tensor:
    """``told_best`` of rows that raced by blocks."""
    race = logits, blocks, rows, row_max, None
    return told_best(*best_from_blocks(*race, vocab_size=vocab_size, block=block, by_bits=by_bits), start)


def winners_of_leaders(leaders: Leaders, winners: Tensor, *, start: int) -> Tensor:
    """``told_best`` of rows that raced by bounds."""
    return told_best(torch.maximum(leaders.best, winners.amax(-1)), leaders.nan_bits, start)


def told_best(packed: Tensor, nan_bits: Tensor, start: int) -> Tensor:
    """What a rank tells of each row: its best packed (key, token id), and 1 for a NaN, int64 ``[R, 2]``."""
    # Subtracting from a packed key adds to its id; a token that is masked may have no id to add to.
    best = torch.where(packed_key(packed) == MASKED_KEY, KEEP_ALL, packed - start)
    return torch.stack([best, (nan_bits > POSITIVE_INFINITY_KEY).to(torch.int64)], 1)


def draw_from_shards(winners: Tensor, row_slots: RowSlots) -> SampleOutputs:
    """Tokens and status ``[R]`` from the largest ``told_best`` of all ranks, int64 ``[R, 2]``."""
    idle = idle_status(row_slots.table, row_slots.slots)
    return tokens_from_packed(winners[:, 0], _nan_bits(winners[:, 1]), idle)


def candidates_of_shard(tokens: Tensor, nan_bits: Tensor, *, start: int, count: int) -> Tensor:
    """The first ``count`` packed (order key, token id) of a shard, 1 for a NaN, a 0: int64 ``[R, count + 2]``."""
    # The 0 lets what each rank told begin at a multiple of 16 bytes, else Inductor's code would copy it.
    has_nan = (nan_bits.amax(-1, keepdim=True) > POSITIVE_INFINITY_KEY).to(torch.int64)
    shifted = F.pad(tokens - start, (0, count - tokens.shape[1]), value=KEEP_ALL)
    return torch.cat([shifted, F.pad(has_nan, (0, 1))], 1)


def candidates_of_shards(told: tuple[Tensor, ...], *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first ``count`` tokens of whole rows, from ``candidates_of_shard`` of each rank."""
    # Returns packed keys in descending order, int64 [R, count], nan_bits, and the first order key, int32 [R, 1] each.
    tokens, has_nan = torch.cat([part[:, :-2] for part in told], 1), torch.cat([part[:, -2:-1] for part in told], 1)
    first = packed_key(tokens.amax(-1, keepdim=True))
    return sort(tokens, count=count), _nan_bits(has_nan.amax(-1, keepdim=True)), first


def _nan_bits(flags: Tensor) -> Tensor:
    """What stands for ``nan_bits``, int32, where flags are 1."""
    return torch.where(flags > 0, POSITIVE_INFINITY_KEY + 1, 0).to(torch.int32)
