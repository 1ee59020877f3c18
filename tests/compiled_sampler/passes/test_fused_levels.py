"""Levels of narrowing in one kernel pick what they do in two: blocks found, then the first of them chosen."""

import pytest
import torch

from compiled_sampler.core.order import MASKED_KEY, packed_key
from compiled_sampler.core.stage import call
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.passes.candidates import (
    STORED_BLOCK,
    all_coarser,
    child_blocks,
    child_tokens,
    choose,
    choose_blocks,
    choose_child_blocks,
    choose_child_tokens,
    sort,
)
from compiled_sampler.passes.maxima import order_maxima

COUNT = 64


def hard_logits(rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Ties, both zeros, NaN, both infinities, a row of one value and a row of nothing but masked tokens."""
    logits = torch.randint(-9, 9, (rows, width), generator=generator).float() / 4
    for value in (-0.0, float("nan"), float("inf"), -float("inf")):
        logits[torch.rand(rows, width, generator=generator) < 0.01] = value
    logits[0], logits[1], logits[2, : width // 2] = 1.0, -float("inf"), float("nan")
    return logits


def found_apart(stage, *tensors, **static) -> torch.Tensor:
    packed = stage(*tensors, **static)
    return choose(packed, count=COUNT) if packed.shape[1] > COUNT else packed


def every_level(logits, vocab_size, run=call):
    """What each kind of level picks in one kernel, and what it picks in two."""
    keys = order_maxima(logits, vocab_size=vocab_size, block=STORED_BLOCK).keys
    blocks = {"ratio": 8}
    parents = found_apart(all_coarser, keys, ratio=64)
    small = found_apart(child_blocks, keys, parents, ratio=8, size=8)
    tokens = {"vocab_size": vocab_size, "ratio": 8}
    pairs = [
        (choose_blocks, all_coarser, (keys,), {"ratio": 1}),
        (choose_blocks, all_coarser, (keys,), blocks),
        (choose_child_blocks, child_blocks, (keys, parents), {"ratio": 8, "size": 8}),
        (choose_child_blocks, child_blocks, (keys, small), {"ratio": 8, "size": 1}),
        (choose_child_tokens, child_tokens, (logits, small), {**tokens, "size": 64}),
        (choose_child_tokens, child_tokens, (logits, small), {**tokens, "size": 8}),
        (choose_child_tokens, child_tokens, (logits, small), {**tokens, "size": 1}),
    ]
    for choosing, stage, tensors, static in pairs:
        yield run(choosing, *tensors, **static, count=COUNT), found_apart(stage, *tensors, **static)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [33_000, 40_037])
def test_a_level_in_one_kernel_picks_the_same(vocab_size, dtype, generator):
    logits = hard_logits(5, vocab_size + 3, generator).to(dtype)
    picked = list(every_level(logits, vocab_size))
    assert len(picked) == 7
    for at_once, apart in picked:
        assert torch.equal(at_once, apart)
        assert at_once.shape == (5, COUNT)


def test_fewer_blocks_than_are_asked_for_are_all_picked(generator):
    keys = torch.randint(-5, 5, (3, 40), generator=generator, dtype=torch.int32)
    assert torch.equal(choose_blocks(keys, ratio=1, count=COUNT), all_coarser(keys, ratio=1))


def test_blocks_beyond_the_row_are_masked():
    keys = torch.arange(9, dtype=torch.int32)[None] + 1
    parents = sort(all_coarser(keys, ratio=8), count=2)
    chosen = choose_child_blocks(keys, parents, ratio=8, size=1, count=10)
    assert sorted(packed_key(chosen)[0].tolist()) == [MASKED_KEY, *range(1, 10)]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [17, 33, 300])
def test_a_level_in_one_kernel_picks_the_same_on_a_gpu(rows, generator):
    logits = hard_logits(rows, 40_040, generator).cuda()
    for at_once, apart in every_level(logits, 40_037, CompiledStages()):
        assert torch.equal(at_once, apart)
