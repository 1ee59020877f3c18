"""What a rank tells the others: the same from blocks that name their tokens, as a GPU's do, and from masks beside."""

import itertools
import random

import pytest
import torch

from compiled_sampler.edits.masks import MaskedLogits, masked
from compiled_sampler.passes.logprobs import law_in_blocks, tokens_before
from compiled_sampler.passes.maxima import order_maxima
from compiled_sampler.passes.shards import first_of_shard, law_keys_of_shard, law_sums_of_shard, words_of_shard
from tests.builders.edits import random_mask
from tests.builders.filters import hard_rows


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


@pytest.mark.parametrize("bounds", [(0, 1300), (0, 1, 700, 1300), (0, 512, 513, 1300)])
def test_shards_tell_the_law_of_whole_rows_with_masks_beside_them(bounds):
    rows, slots = hard_rows(1300), torch.arange(12)
    mask = random_mask(random.Random(1), len(rows), 1300)
    whole, tokens = masked(rows, mask, slots, None, vocab_size=1300), rows.nan_to_num().argmin(1)
    law = law_in_blocks(whole, None, vocab_size=1300, moment=True, by_bits=False)
    shards = []
    for start, stop in itertools.pairwise(bounds):
        width = stop - start
        words = words_of_shard(mask, slots, None, vocab_size=1300, start=start, width=width)
        static = {"vocab_size": width, "start": start, "num_blocks": 3}
        shards.append((MaskedLogits(rows[:, start:stop], words, slots, None), static))
    told = [law_keys_of_shard(logits, (tokens[:, None],), **static) for logits, static in shards]
    keys = torch.stack(told).amax(0)
    sums = sum(
        law_sums_of_shard(logits, keys, None, tokens, **static, moment=True, rank=True) for logits, static in shards
    )
    assert isinstance(sums, torch.Tensor)
    assert torch.equal(keys[:, :3], law.keys)
    assert torch.equal(sums[:, :3], law.masses)
    assert torch.equal(sums[:, 3:6], law.moments)
    before = tokens_before(whole, tokens, vocab_size=1300, block=1300).sum(1)
    is_visible = whole.gather(1, tokens[:, None])[:, 0] > -torch.inf
    assert is_visible.any()
    assert torch.equal(sums[is_visible, 6], before[is_visible])
