"""Blocks of rows, and what a pass finds in them: the same on a GPU's ways and on those of C++, whatever they hold."""

import math

import pytest
import torch

from compiled_sampler.core.order import MASKED_KEY, POSITIVE_INFINITY_KEY, order_key, packed_key
from compiled_sampler.passes.blocks import gather_logits, gather_logits_of, own_tokens, rows_in_windows
from compiled_sampler.passes.maxima import (
    first_token,
    largest_in_each,
    largest_logit,
    order_maxima,
    order_maxima_of,
    row_nan_bits,
)
from compiled_sampler.passes.shards import first_of_shard


def tied(rows: int, vocab_size: int) -> torch.Tensor:
    """Logits of few values, so that blocks tie, with NaN, infinities, both zeros, and rows that are all masked."""
    values = torch.tensor([-torch.inf, torch.nan, -1.5, -0.0, 0.0, 2.0, 2.0])
    x = values[torch.randint(len(values), (rows, vocab_size))]
    x[0], x[1], x[2, -1] = -torch.inf, torch.nan, torch.inf
    return x


NAN_BITS = [0x7FC00000, 0x7F800001, 0x7FFFFFFF, -0x400000, -0x7FFFFF, -1]
"""NaNs of both signs, quiet and signalling."""


def reduction(block: int, by_bits: bool) -> dict[str, int]:
    """How a pass reduces blocks: as C++ does, or by bits and in slices, as a GPU does."""
    slices = math.gcd(min(8, max(block // 16, 1)), block) if by_bits else 1
    return {"block": block, "slices": slices, "by_bits": by_bits}


def hard_blocks(count: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    """Blocks ``[count, block]`` of few values each, from a few kinds of values: ties, zeros, infinities, NaNs."""
    nans = torch.tensor(NAN_BITS, dtype=torch.int32).view(torch.float32)
    tiny = torch.finfo(dtype).smallest_normal / 4
    kinds = [
        torch.tensor([-torch.inf, torch.inf]),
        torch.tensor([-0.0, 0.0, -tiny, -1.0]),
        torch.tensor([-tiny, -2.0, -3.0, -torch.inf]),
        torch.tensor([tiny, -tiny, 2 * tiny]),
        torch.tensor([-torch.inf]),
        torch.randn(block),
    ]
    kinds = [torch.cat([kind, nans[: i * len(nans)]]) for kind in kinds for i in (0, 1)] + [nans]
    drawn = [kinds[i % len(kinds)] for i in range(count)]
    return torch.stack([kind[torch.randint(len(kind), (block,))] for kind in drawn]).to(dtype)


@pytest.mark.parametrize("by_bits", [False, True])
@pytest.mark.parametrize(
    ("block", "left_out", "dtype"),
    [(4, 0, torch.float32), (16, 3, torch.bfloat16), (64, 63, torch.float16), (1024, 640, torch.float32)],
)
def test_blocks_hold_their_largest_key_its_first_token_and_whether_there_is_a_nan(block, left_out, dtype, by_bits):
    x = hard_blocks(78, block, dtype).view(3, 26 * block)
    vocab_size = 26 * block - left_out
    found = order_maxima(x, vocab_size=vocab_size, **reduction(block, by_bits), names=True)
    for row, keys, nan_bits, ids in zip(x, found.keys, found.nan_bits, found.token_ids, strict=True):
        parts = row[:vocab_size].to(torch.float32).split(block)
        wanted = [order_key(part) for part in parts]
        assert keys.tolist() == [key.max().item() for key in wanted]
        assert ids.tolist() == [i * block + key.tolist().index(key.max().item()) for i, key in enumerate(wanted)]
        assert (nan_bits > POSITIVE_INFINITY_KEY).tolist() == [part.isnan().any().item() for part in parts]


@pytest.mark.parametrize("by_bits", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 1000])
def test_blocks_that_name_their_first_token_need_no_second_look(vocab_size, by_bits):
    x = tied(40, vocab_size)
    found = {}
    for names in (False, True):
        blocks = order_maxima(x, vocab_size=vocab_size, **reduction(64, by_bits), names=names)
        assert (blocks.token_ids is not None) == names
        found[names] = first_token(x, blocks, vocab_size, 64)
    visible = packed_key(found[False][0]) != MASKED_KEY
    assert visible.any()
    assert found[True][0][visible].equal(found[False][0][visible])
    assert (packed_key(found[True][0][~visible]) == MASKED_KEY).all()
    assert found[True][1].equal(found[False][1])


@pytest.mark.parametrize("keys_in_a_row", [1, 63, 64, 65])
def test_every_block_finds_the_largest_logit_of_its_row(keys_in_a_row):
    keys = torch.randint(-(2**31), 2**31, (5, keys_in_a_row), dtype=torch.int64).to(torch.int32)
    wanted = largest_logit(keys)[:, None].expand(5, 7)
    for per_block in (False, True):
        assert largest_in_each(keys, 7, 64, per_block=per_block).expand(5, 7).equal(wanted)


@pytest.mark.parametrize("by_bits", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 1000])
def test_blocks_of_some_rows_hold_what_blocks_of_all_do(vocab_size, by_bits):
    x = hard_blocks(40, vocab_size, torch.float32)
    row_ids = torch.tensor([39, 0, 7, 7, 12, 25])
    some = order_maxima_of(x, row_ids, vocab_size=vocab_size, **reduction(64, by_bits))
    every = order_maxima(x, vocab_size=vocab_size, **reduction(64, by_bits), names=True)
    whole = slice(None, vocab_size // 64)  # the last window reaches back into the block before
    assert torch.equal(some.keys[:, whole], every.keys[row_ids][:, whole])
    assert torch.equal(some.token_ids[:, whole], every.token_ids[row_ids][:, whole])
    assert torch.equal(some.keys.amax(-1), every.keys[row_ids].amax(-1))
    assert torch.equal(
        (some.nan_bits > POSITIVE_INFINITY_KEY).any(-1), (every.nan_bits[row_ids] > POSITIVE_INFINITY_KEY).any(-1)
    )


@pytest.mark.parametrize("count", [1, 5, 63, 64, 65, 127, 128, 2374])
def test_one_of_many_magnitudes_is_found_wherever_it_stands(count):
    nan_bits = torch.eye(count, dtype=torch.int32)
    assert row_nan_bits(nan_bits, 64).tolist() == [1] * count
    assert row_nan_bits(torch.zeros_like(nan_bits), 64).tolist() == [0] * count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "block"), [(64, 16), (65, 16), (9, 16), (1, 4), (127, 64)])
def test_windows_hold_the_tokens_of_the_rows_and_nothing_else(vocab_size, block, dtype):
    values = torch.randn(7, vocab_size + 3).to(dtype)
    row_ids = torch.tensor([6, 0, 3, 3])
    x, ids = rows_in_windows(values, row_ids, vocab_size, block)
    assert x.shape == (4, -(-vocab_size // block), block)
    assert (x.dtype, ids.dtype, ids.shape) == (torch.float32, torch.int32, x.shape[1:])
    for found, row in zip(x, values[row_ids].to(torch.float32), strict=True):
        inside = ids < vocab_size
        assert found[inside].equal(row[ids[inside]])
        assert (found[~inside] == -torch.inf).all()
    own = ids[own_tokens(ids, block)]  # once, though the last window reaches back
    assert own[own < vocab_size].tolist() == list(range(vocab_size))
    assert ids[:-1].flatten().tolist() == list(range(block * (len(ids) - 1)))
    assert len(ids) == 1 or ids[-1, -1] == vocab_size - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_named_rows_are_those_of_copied_rows(dtype):
    values, row_ids = torch.randn(7, 12).to(dtype), torch.tensor([6, 0, 3])
    ids = torch.tensor([[0, 8, 9], [-1, 3, 11], [5, 5, 2**31]])  # of 9 tokens
    assert gather_logits_of(values, row_ids, ids, 9).equal(gather_logits(values[row_ids], ids, 9))


def test_blocks_that_name_their_tokens_tell_other_ranks_the_same():
    rows = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    rows[0], rows[1, 7], rows[2, 40:] = -torch.inf, torch.nan, 9.0
    rows[3, ::2], rows[3, 1::2] = -torch.inf, torch.nan
    blocks = {"vocab_size": 300, "block": 32}
    told = [
        first_of_shard(rows, order_maxima(rows, **blocks, names=names), **blocks, start=1000) for names in (False, True)
    ]
    assert torch.equal(*told)
    assert told[0][:, 1].tolist() == [0, 1, 0, 1, 0]
