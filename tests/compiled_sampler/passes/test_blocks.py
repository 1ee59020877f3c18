"""Rows in blocks: every token of the rows that are named stands in the blocks, and nothing else does."""

import pytest
import torch

from compiled_sampler.passes.blocks import gather_logits, gather_logits_of, own_tokens, rows_in_windows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab_size", "block"), [(64, 16), (65, 16), (127, 64), (16, 16), (9, 16), (1, 4)])
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
    assert set(ids.flatten().tolist()) >= set(range(vocab_size))


@pytest.mark.parametrize("vocab_size", [65, 127, 151_936])
def test_a_token_stands_in_its_own_block_also_where_the_last_reaches_back(vocab_size):
    _, ids = rows_in_windows(torch.zeros(1, vocab_size), torch.tensor([0]), vocab_size, 64)
    own = torch.arange(ids.numel()).view(ids.shape)
    assert ids[:-1].equal(own[:-1].to(torch.int32))
    assert ids[-1, -1] == vocab_size - 1
    assert ids[-1, 0] <= own[-1, 0]


@pytest.mark.parametrize("vocab_size", [1, 9, 64, 65, 127])
def test_each_token_is_some_windows_own_once(vocab_size):
    _, ids = rows_in_windows(torch.zeros(1, vocab_size), torch.tensor([0]), vocab_size, 64)
    own = ids[own_tokens(ids, 64)]
    assert own[own < vocab_size].tolist() == list(range(vocab_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_named_rows_are_those_of_copied_rows(dtype):
    values, row_ids = torch.randn(7, 12).to(dtype), torch.tensor([6, 0, 3])
    ids = torch.tensor([[0, 8, 9], [-1, 3, 11], [5, 5, 2**31]])  # of 9 tokens
    assert gather_logits_of(values, row_ids, ids, 9).equal(gather_logits(values[row_ids], ids, 9))
