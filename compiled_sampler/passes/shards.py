"""Rows whose columns are split over ranks: what a rank tells the others of its own columns, and the draw from that."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import SampleOutputs
from compiled_sampler.core.filters import KEEP_ALL, mass_cut
from compiled_sampler.core.mass import exp2_mass, scaled_logits
from compiled_sampler.core.noise import NoiseKeys
from compiled_sampler.core.order import (
    MASKED_KEY,
    POSITIVE_INFINITY_KEY,
    Last,
    indices,
    key_float,
    order_key,
    pack,
    packed_key,
    reaches,
)
from compiled_sampler.core.rows import RowParams, RowSlots, expand_to, gather_rows, idle_status
from compiled_sampler.core.stage import holds
from compiled_sampler.edits.allowed_token_ids import AllowedIds
from compiled_sampler.edits.masks import row_words
from compiled_sampler.logprobs import LogprobOutputs
from compiled_sampler.passes.blocks import AnyLogits, all_logits, gather_logits, in_blocks, logit_blocks
from compiled_sampler.passes.bounds import Leaders
from compiled_sampler.passes.candidates import sort
from compiled_sampler.passes.kept import Kept
from compiled_sampler.passes.logprobs import (
    LAW_BLOCK,
    Asked,
    BlockLaws,
    block_laws,
    logprobs_from_logits,
    sum_block_laws,
)
from compiled_sampler.passes.maxima import BlockMaxima, first_token, kept_in_kernel, mass_units
from compiled_sampler.passes.race import best_from_blocks, draw_from_candidates, tokens_from_packed


def rows_of_shard(row_slots: RowSlots, *, stream: int, start: int) -> RowParams:
    """``gather_rows`` for columns that begin at token ``start``: column i has the noise of token ``start + i``."""
    rows = gather_rows(row_slots, stream=stream)
    first, second, third, fourth = rows.keys
    # Noise reads an id as ``id * first + second`` alone (core/noise.py), modulo 2**32.
    shifted = NoiseKeys(first, first * start + second, third, fourth)
    live, idle, _, *parameters = rows
    return RowParams(live, idle, shifted, *parameters)


def raced_rows(largest: Tensor, row_slots: RowSlots, *, stream: int, start: int) -> tuple[RowParams, Tensor, Tensor]:
    """``rows_of_shard``, and ``mass_units`` of the largest order keys of whole rows, in one kernel."""
    return rows_of_shard(row_slots, stream=stream, start=start), *mass_units(largest, row_slots)


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
    if blocks.token_ids is not None:
        return _told_named(blocks, blocks.token_ids, start)
    return told_best(*first_token(logits, blocks, vocab_size, block), start)


@holds(blocks=1)
def winners_of_blocks(
    logits: AnyLogits,
    blocks: BlockMaxima,
    rows: RowParams,
    row_max: Tensor | None,
    last: Last | None,
    *,
    vocab_size: int,
    block: int,
    by_bits: bool,
    start: int,
) -> Tensor:
    """``told_best`` of rows that raced by blocks, up to ``last``."""
    if blocks.token_ids is not None:
        return _told_named(blocks, blocks.token_ids, start)
    race = logits, blocks, rows, row_max, last
    return told_best(*best_from_blocks(*race, vocab_size=vocab_size, block=block, by_bits=by_bits), start)


def winners_of_leaders(leaders: Leaders, winners: Tensor, *, start: int) -> Tensor:
    """``told_best`` of rows that raced by bounds."""
    return told_best(torch.maximum(leaders.best, winners.amax(-1)), leaders.nan_bits, start)


def told_best(packed: Tensor, nan_bits: Tensor, start: int) -> Tensor:
    """What a rank tells of each row: its best packed (key, token id), and 1 for a NaN, int64 ``[R, 2]``."""
    # Subtracting from a packed key adds to its id; a token that is masked may have no id to add to.
    best = torch.where(packed_key(packed) == MASKED_KEY, KEEP_ALL, packed - start)
    return torch.stack([best, (nan_bits > POSITIVE_INFINITY_KEY).to(torch.int64)], 1)


def _told_named(blocks: BlockMaxima, token_ids: Tensor, start: int) -> Tensor:
    """``told_best`` from blocks that name their tokens: one reduction, as Inductor makes a kernel of each column."""
    is_best = torch.arange(2, device=token_ids.device) == 0
    packed, nan_bits = pack(blocks.keys, token_ids)[:, None], blocks.nan_bits[:, None].to(torch.int64)
    largest = torch.where(is_best[:, None], packed, nan_bits).amax(-1)
    best = torch.where(packed_key(largest) == MASKED_KEY, KEEP_ALL, largest - start)
    return torch.where(is_best, best, (largest > POSITIVE_INFINITY_KEY).to(torch.int64))


def draw_from_shards(winners: Tensor, row_slots: RowSlots) -> SampleOutputs:
    """Tokens and status ``[R]`` from the largest ``told_best`` of all ranks, int64 ``[R, 2]``."""
    idle = idle_status(row_slots.table, row_slots.slots)
    return tokens_from_packed(winners[:, 0], _nan_bits(winners[:, 1]), idle)


def candidates_of_shard(tokens: Tensor, nan_bits: Tensor, *, start: int, count: int) -> Tensor:
    """The first ``count`` packed (order key, token id) of a shard, 1 for a NaN, a 0: int64 ``[R, count + 2]``."""
    # The 0 lets what each rank told begin at a multiple of 16 bytes, else Inductor would copy it. One expression,
    # as Inductor makes a kernel of each tensor that is padded.
    has_nan = (nan_bits.amax(-1, keepdim=True) > POSITIVE_INFINITY_KEY).to(torch.int64)
    place, known = torch.arange(count + 2, device=tokens.device), tokens.shape[1]
    further = torch.where(place < count, KEEP_ALL, torch.where(place == count, has_nan, 0))
    return torch.where(place < known, tokens[:, place.clamp(max=known - 1)] - start, further)


def draw_from_told(told: tuple[Tensor, ...], row_slots: RowSlots, *, count: int | None, stream: int) -> SampleOutputs:
    """``draw_from_candidates`` of what ``candidates_of_shard`` has of each rank: of the first ``count``, or of all."""
    # Behind the C first tokens there is nothing that a row keeps. To cut them off would be a kernel more, so this is
    # done only where C tokens are the whole vocabulary, and what is behind them is none.
    tokens, nan_bits = _joined(told)
    ordered = sort(tokens, count=tokens.shape[1])[:, :count]
    return draw_from_candidates(ordered, nan_bits, row_slots, None, stream=stream)


def candidates_of_shards(told: tuple[Tensor, ...], *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first ``count`` tokens of whole rows, from ``candidates_of_shard`` of each rank."""
    # Returns packed keys in descending order, int64 [R, count], nan_bits, and the first order key, int32 [R, 1] each.
    tokens, nan_bits = _joined(told)
    return sort(tokens, count=count), nan_bits, packed_key(tokens.amax(-1, keepdim=True))


def _joined(told: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The candidates of all shards, int64 ``[R, T * C]``, and ``nan_bits`` ``[R, 1]``."""
    tokens, has_nan = torch.cat([part[:, :-2] for part in told], 1), torch.cat([part[:, -2:-1] for part in told], 1)
    return tokens, _nan_bits(has_nan.amax(-1, keepdim=True))


@holds(tokens=True)
def law_keys_of_shard(
    logits: AnyLogits, ids: tuple[Tensor, ...], *, vocab_size: int, start: int, num_blocks: int
) -> Tensor:
    """Order keys in whole rows: the largest of each ``LAW_BLOCK``, then those of tokens; int32 ``[R, B + m]``."""
    # Of what a rank does not have it tells MASKED_KEY.
    x, _ = _law_blocks(logits, vocab_size, start)
    own_ids = torch.cat(ids, 1) - start
    asked = torch.where(own_ids >= 0, order_key(gather_logits(logits, own_ids, vocab_size)), MASKED_KEY)
    return torch.cat([_in_whole_row(order_key(x).amax(-1), start, num_blocks, MASKED_KEY), asked], 1)


@holds(tokens=True)
def law_sums_of_shard(
    logits: AnyLogits,
    keys: Tensor,
    scale: Tensor | None,
    token_ids: Tensor,
    *,
    vocab_size: int,
    start: int,
    num_blocks: int,
    moment: bool,
    rank: bool,
) -> Tensor:
    """Sums of a shard: masses ``[R, B]`` of the blocks, moments ``[R, B]``, tokens before the row's ``[R, 1]``."""
    # keys are the largest law_keys_of_shard of all ranks. The sums are int64, one after the other.
    x, ids = _law_blocks(logits, vocab_size, start)
    first = start // LAW_BLOCK
    _, *parts = block_laws(x, keys[:, first : first + x.shape[1]], scale, moment=moment)
    sums = [_in_whole_row(part, start, num_blocks, 0) for part in parts if part is not None]
    if rank:
        before = Last(expand_to(keys[:, num_blocks], x), expand_to((token_ids - 1).to(torch.int32), x))
        sums.append(reaches(x, ids, before).to(torch.int32).sum(-1, dtype=torch.int64).sum(-1, keepdim=True))
    return torch.cat(sums, 1)


def logprobs_of_shards(
    told: tuple[Tensor, Tensor, Tensor | None], row_slots: RowSlots, ids: tuple[Tensor, ...], *, num_blocks: int,
    entropy: bool, rank: bool,
) -> tuple[Kept, LogprobOutputs]:  # fmt: skip
    """The law of whole rows, and its logprobs ``[R]``, from the largest keys and the sums of all ranks."""
    keys, sums, scale = told
    masses, moments = sums[:, :num_blocks], sums[:, num_blocks : 2 * num_blocks]
    law = sum_block_laws(BlockLaws(keys[:, :num_blocks], masses, moments if entropy else None), scale)
    asked = Asked(ids[0][:, 0], ids[1] if len(ids) > 1 else None, sums[:, -1:] if rank else None)
    x, given = key_float(keys[:, num_blocks:]).tensor_split([1], 1)
    return law, logprobs_from_logits(x, given, row_slots, law, asked, entropy=entropy)


def _law_blocks(logits: AnyLogits, vocab_size: int, start: int) -> tuple[Tensor, Tensor]:
    """A shard's logits in those blocks of whole rows that it has a part of, and token ids, as ``logit_blocks``."""
    first, before = divmod(start, LAW_BLOCK)
    x = in_blocks(F.pad(all_logits(logits, vocab_size), (before, 0), value=-torch.inf), LAW_BLOCK, -torch.inf)
    return x, (indices(x.shape[1] * LAW_BLOCK, x.device) + first * LAW_BLOCK).view(-1, LAW_BLOCK)


def _in_whole_row(parts: Tensor, start: int, num_blocks: int, fill: int) -> Tensor:
    """The blocks of a shard at their places among those of whole rows ``[R, B]``."""
    first = start // LAW_BLOCK
    return F.pad(parts, (first, num_blocks - first - parts.shape[1]), value=fill)


class KeyRange(NamedTuple):
    """The order keys among which that of a filter's last kept token is, int64 ``[R]`` each."""

    first: Tensor
    """The least of them."""
    step: Tensor
    """A sixteenth of their number; 0 if there is one."""
    weight_above: Tensor
    """Of all tokens with larger keys, their number or their mass."""


KEY_ROUNDS, _PARTS = 8, 16  # 16 ** 8 == 2 ** 32


def every_key(live: Tensor) -> KeyRange:
    """All keys ``[R]``."""
    values = MASKED_KEY, 2**32 // _PARTS, 0
    return KeyRange(*(kept_in_kernel(live, value, 1) for value in values))


@holds(tokens=True)
def weights_from_keys(
    logits: AnyLogits, keys: KeyRange, row_max: Tensor, scale: Tensor, *, vocab_size: int, block: int, by_mass: bool
) -> Tensor:
    """What the tokens from 15 keys on weigh, which part a range in 16: int64 ``[R, 15, B]``, by blocks."""
    # Reductions, as Inductor has no histogram: an atomic addition of int64 is a kernel of ATen's.
    x, _ = logit_blocks(logits, vocab_size, block)
    key, weights = order_key(x), []
    mass = exp2_mass(scaled_logits(x, expand_to(row_max, x), expand_to(scale, x))) if by_mass else None
    for part in range(1, _PARTS):
        is_counted = key >= expand_to((keys.first + part * keys.step).to(torch.int32), key)
        counted = is_counted.to(torch.int32) if mass is None else torch.where(is_counted, mass, 0)
        weights.append(counted.sum(-1, dtype=torch.int64))
    return torch.stack(weights, 1)


def part_of_keys(keys: KeyRange, weights: Tensor, goal: Tensor) -> KeyRange:
    """The part ``[R]`` in which the weight reaches the goal, from the weights of all ranks, int64 ``[R, 15]``."""
    is_reached = weights >= goal[:, None]
    first = keys.first + is_reached.sum(-1) * keys.step
    return KeyRange(first, keys.step // _PARTS, torch.where(is_reached, keys.weight_above[:, None], weights).amax(-1))


def before_last_key(top_k_keys: KeyRange, *, base_is_row: bool) -> Last:
    """What the tokens reach ``[R]`` that are before those of top-k's last key, or all visible tokens."""
    key = top_k_keys.first.to(torch.int32)
    return Last(torch.full_like(key, MASKED_KEY) if base_is_row else key, torch.full_like(key, -1))


def top_p_goal(mass: Tensor, keys: KeyRange, rows: RowParams, row_max: Tensor, *, base_is_row: bool) -> Tensor:
    """The mass that top-p keeps at least, int64 ``[R]``, from that of the tokens of ``before_last_key``."""
    if not base_is_row:
        mass = mass + (rows.top_k - keys.weight_above) * _mass_of_key(keys.first, rows, row_max)
    return mass_cut(rows.top_p, mass)


def last_kept_key(
    top_k_keys: KeyRange, top_p_keys: KeyRange | None, goal: Tensor | None, rows: RowParams, row_max: Tensor
) -> tuple[Tensor, Tensor]:
    """The order key of the last kept token, int32 ``[R]``, and how many tokens with it are kept, int64 ``[R]``."""
    key, count = top_k_keys.first, rows.top_k - top_k_keys.weight_above
    if top_p_keys is not None and goal is not None:
        # each of these tokens has one mass, and is kept if the tokens before it do not reach the goal
        mass = _mass_of_key(top_p_keys.first, rows, row_max).clamp(min=1)
        other, others = top_p_keys.first, (goal - top_p_keys.weight_above - 1) // mass + 1
        least = torch.where(key == other, torch.minimum(count, others), torch.where(key > other, count, others))
        key, count = torch.maximum(key, other), least
    return key.to(torch.int32), count


def _mass_of_key(key: Tensor, rows: RowParams, row_max: Tensor) -> Tensor:
    return exp2_mass(scaled_logits(key_float(key.to(torch.int32)), row_max, rows.scale))


@holds(tokens=True)
def count_of_key(logits: AnyLogits, key: Tensor, *, vocab_size: int, block: int) -> Tensor:
    """The tokens of each block that have the row's key, int64 ``[R, B]``."""
    x, _ = logit_blocks(logits, vocab_size, block)
    return (order_key(x) == expand_to(key, x)).to(torch.int32).sum(-1, dtype=torch.int64)


def last_of_shard(
    logits: AnyLogits,
    counts: Tensor,
    counts_before: tuple[Tensor, ...],
    key: Tensor,
    kept: Tensor,
    *,
    vocab_size: int,
    block: int,
) -> Last:
    """The last kept token ``[R]`` among the columns of a rank, if ``kept`` tokens with its key are kept in all."""
    # counts: of these tokens in each block [R, B]; counts_before: in each rank before, whose ids come first [R]
    for count in counts_before:
        kept = kept - count
    kept = kept.clamp(min=0)[:, None]
    ends = counts.cumsum(-1)
    in_block = (ends < kept).sum(-1, keepdim=True).clamp(max=counts.shape[1] - 1)
    kept_in_block = kept - (ends - counts).gather(1, in_block)
    ids = in_block * block + torch.arange(block, device=key.device)
    is_equal = order_key(gather_logits(logits, ids, vocab_size)) == key[:, None]
    last = in_block * block + (is_equal.to(torch.int64).cumsum(-1) < kept_in_block).sum(-1, keepdim=True)
    return Last(key, torch.where(kept > 0, last, -1)[:, 0].to(torch.int32))


def _nan_bits(flags: Tensor) -> Tensor:
    """What stands for ``nan_bits``, int32, where flags are 1."""
    return torch.where(flags > 0, POSITIVE_INFINITY_KEY + 1, 0).to(torch.int32)
