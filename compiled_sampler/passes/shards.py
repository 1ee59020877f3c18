"""Rows whose columns are split over ranks: what a rank tells the others of its own columns, and the draw from that."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import RowStatus, SampleOutputs
from compiled_sampler.core.filters import KEEP_ALL
from compiled_sampler.core.noise import NoiseKeys
from compiled_sampler.core.order import MASKED_KEY, POSITIVE_INFINITY_KEY, pack, packed_key
from compiled_sampler.core.rows import RowParams, RowSlots, gather_rows, idle_status
from compiled_sampler.core.score import admitted_key
from compiled_sampler.passes.blocks import gather_logits
from compiled_sampler.passes.candidates import sort
from compiled_sampler.passes.race import tokens_from_packed


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


def winners_of_shard(logits: Tensor, drawn: SampleOutputs, rows: RowParams, *, vocab_size: int, start: int) -> Tensor:
    """The winner of each row's race in a shard, packed (score key, token id), and 1 for a NaN: int64 ``[R, 2]``."""
    ids = drawn.token_ids[:, None]
    x = gather_logits(logits, ids, vocab_size)
    key = admitted_key(x, ids.to(torch.int32), rows, None, None, by_key=True)[:, 0]
    packed = pack(torch.where(drawn.token_ids >= 0, key, MASKED_KEY), drawn.token_ids + start)
    has_nan = rows.live & ((drawn.status & int(RowStatus.NAN_SEEN)) != 0)
    return torch.stack([packed, has_nan.to(torch.int64)], 1)


def draw_from_shards(winners: Tensor, row_slots: RowSlots) -> SampleOutputs:
    """Tokens and status ``[R]`` from the largest ``winners_of_shard`` of all ranks, int64 ``[R, 2]``."""
    idle = idle_status(row_slots.table, row_slots.slots)
    return tokens_from_packed(winners[:, 0], _nan_bits(winners[:, 1]), idle)


def candidates_of_shard(tokens: Tensor, nan_bits: Tensor, *, start: int, count: int) -> Tensor:
    """The first ``count`` packed (order key, token id) of a shard, and 1 for a NaN: int64 ``[R, count + 1]``."""
    has_nan = (nan_bits.amax(-1, keepdim=True) > POSITIVE_INFINITY_KEY).to(torch.int64)
    shifted = F.pad(tokens - start, (0, count - tokens.shape[1]), value=KEEP_ALL)  # ids are subtracted in a packed key
    return torch.cat([shifted, has_nan], 1)


def candidates_of_shards(collected: Tensor, *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first ``count`` tokens of whole rows, from ``candidates_of_shard`` of all ranks, int64 ``[T, R, C + 1]``."""
    # Returns packed keys in descending order, int64 [R, count], nan_bits, and the first order key, int32 [R, 1] each.
    tokens = collected[:, :, :-1].permute(1, 0, 2).flatten(1)
    ordered = sort(tokens, count=count)
    return ordered, _nan_bits(collected[:, :, -1].amax(0))[:, None], packed_key(tokens.amax(-1, keepdim=True))


def _nan_bits(flags: Tensor) -> Tensor:
    """What stands for ``nan_bits``, int32, where flags are 1."""
    return torch.where(flags > 0, POSITIVE_INFINITY_KEY + 1, 0).to(torch.int32)
