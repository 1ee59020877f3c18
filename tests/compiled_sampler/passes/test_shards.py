"""What a rank tells the others: the same from blocks that name their tokens, as a GPU's do, and from others."""

import torch

from compiled_sampler.passes.maxima import order_maxima
from compiled_sampler.passes.shards import first_of_shard


def test_blocks_that_name_their_tokens_tell_the_same():
    rows = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    rows[0], rows[1, 7], rows[2, 40:] = -torch.inf, torch.nan, 9.0
    rows[3, ::2], rows[3, 1::2] = -torch.inf, torch.nan
    blocks = {"vocab_size": 300, "block": 32}
    told = [
        first_of_shard(rows, order_maxima(rows, **blocks, names=names), **blocks, start=1000) for names in (False, True)
    ]
    assert torch.equal(*told)
    assert told[0][:, 1].tolist() == [0, 1, 0, 1, 0]
