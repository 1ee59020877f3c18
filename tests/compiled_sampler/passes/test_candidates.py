"""Narrowing finds the first C tokens of the order exactly, whatever the blocks and the values."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_sampler.core.order import MASKED_KEY, key_float, packed_id, packed_key
from compiled_sampler.core.stage import call
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import Mode
from compiled_sampler.passes.candidates import (
    MOST_CHOSEN,
    STORED_BLOCK,
    all_coarser,
    child_blocks,
    child_tokens,
    choose,
    choose_blocks,
    choose_child_blocks,
    choose_child_tokens,
    number,
    place,
    rank,
    sort,
)
from compiled_sampler.passes.maxima import coarser_keys, order_maxima
from compiled_sampler.pipeline.schedule import StepRun, schedule_for
from compiled_sampler.pipeline.search import ordered_candidates
from tests.builders.inputs import VOCAB_SIZES
from tests.builders.masks import stages_watched
from tests.for_a_gpu import gpu_schedule
from tests.oracles import oracle

KEYS = (MASKED_KEY, MASKED_KEY + 1, -(2**30), -5, -1, 0, 1, 5, 2**30 - 1, 2**30, 2**31 - 1)
"""Order keys, among them those next to the pivots of ``choose``."""


def first_ids(logits: torch.Tensor, vocab_size: int, capacity: int = 64) -> list[list[int]]:
    """Visible ids of the first ``capacity`` tokens of each row, as the pipeline finds them on the CPU and on a GPU."""
    mode = Mode("test", vocab_size, capacity=capacity)
    blocks = order_maxima(logits, vocab_size=vocab_size, block=STORED_BLOCK).keys
    rows = logits.shape[0]
    ordered = ordered_candidates(StepRun(call, schedule_for(mode, rows, logits.device)), logits, blocks)
    for others in (rows, 17, 300):  # which are ranked, or chosen in one kernel or in two
        assert torch.equal(ordered_candidates(StepRun(call, gpu_schedule(mode, others)), logits, blocks), ordered)
    assert ordered.shape == (logits.shape[0], min(capacity, vocab_size))
    ids, visible = packed_id(ordered), packed_key(ordered) != MASKED_KEY
    return [row[mask].tolist() for row, mask in zip(ids, visible, strict=True)]


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "capacity"),
    [
        *((size, torch.float32, 64) for size in VOCAB_SIZES),
        *((size, torch.bfloat16, 64) for size in (600, 151_936)),
        *((5000, torch.bfloat16, capacity) for capacity in (1, 63, 256)),
    ],
)
def test_the_first_tokens_are_the_oracles(vocab_size, dtype, capacity, generator):
    logits = torch.randn(3, vocab_size, generator=generator).to(dtype)
    logits[0] = 0.0  # of ties the lowest ids are first
    assert first_ids(logits, vocab_size, capacity) == [oracle.order(row)[:capacity] for row in logits.tolist()]


@given(st.integers(1, 700), st.integers(1, 64), st.randoms(use_true_random=False))
def test_few_visible_tokens_are_all_found(vocab_size, count, random):
    row = torch.full((1, vocab_size), -math.inf)
    for i in random.sample(range(vocab_size), min(count, vocab_size)):
        row[0, i] = random.choice([0.0, -0.0, 1.0, -3.0])
    assert first_ids(row, vocab_size) == [oracle.order(row[0].tolist())[:64]]


@pytest.mark.parametrize("vocab_size", [1, 513, 151_936, 300_000, 2**22])
def test_block_sizes_descend_to_single_tokens(vocab_size):
    mode = Mode("test", vocab_size, capacity=64)
    on_gpu = gpu_schedule(mode, 1).levels
    assert -(-vocab_size // on_gpu[0]) <= 512
    for sizes in (on_gpu, schedule_for(mode, 1, torch.device("cpu")).levels):
        assert sizes[-1] == 1
        assert all(a % b == 0 and a > b for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    ("rows", "vocab_size", "weighs", "stages"),
    [(17, 151_936, False, 5), (17, 300_000, False, 7), (255, 32_768, True, 7), (256, 32_768, True, 4)],
)
def test_a_level_of_blocks_of_few_parts_is_one_stage_but_beside_a_pass_over_rows(rows, vocab_size, weighs, stages):
    ran, logits = list[str](), torch.randn(rows, vocab_size)
    keys = order_maxima(logits, vocab_size=vocab_size, block=STORED_BLOCK).keys
    schedule = gpu_schedule(Mode("test", vocab_size, capacity=64, beyond_candidates=weighs), rows)
    found = ordered_candidates(StepRun(stages_watched(ran), schedule), logits, keys)
    assert len(ran) == stages
    assert packed_id(found).tolist() == logits.sort(dim=-1, descending=True, stable=True).indices[:, :64].tolist()


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40))
def test_ranks_are_a_permutation_and_placing_by_them_is_a_sort(keys):
    packed = number(torch.tensor([keys], dtype=torch.int32))
    ranks = rank(packed)
    assert sorted(ranks[0].tolist()) == list(range(packed.shape[1]))
    assert torch.equal(place(packed, ranks, count=len(keys)), sort(packed, count=len(keys)))
    assert packed_key(sort(packed, count=len(keys)))[0].tolist() == sorted(keys, reverse=True)


@given(st.lists(st.sampled_from(KEYS), min_size=1, max_size=40), st.data())
def test_choosing_keeps_the_largest_where_they_stood(keys, data):
    count = data.draw(st.integers(1, len(keys)))
    packed = number(torch.tensor([keys, keys[::-1]], dtype=torch.int32))
    chosen = choose(packed, count=count)
    assert torch.equal(sort(chosen, count=count), sort(packed, count=count))
    assert bool((packed_id(chosen).diff() > 0).all())


@pytest.mark.parametrize("spread", [1, 3, 50, 2**31 - 1])
@pytest.mark.parametrize("width", [64, 65, 297, 512, MOST_CHOSEN])
def test_choosing_among_many_keys_is_a_sort(width, spread, generator):
    keys = torch.randint(-spread, spread, (9, width), generator=generator, dtype=torch.int32)
    keys[0], keys[1, 40:] = MASKED_KEY, MASKED_KEY
    packed = number(keys)
    assert torch.equal(sort(choose(packed, count=64), count=64), sort(packed, count=64))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 300])
def test_every_way_to_the_largest_is_one_on_a_gpu(rows, generator):
    packed = number(torch.randint(-40, 40, (rows, 512), generator=generator, dtype=torch.int32)).cuda()
    run, expected = CompiledStages(), packed.sort(-1, descending=True).values[:, :64]
    assert torch.equal(run(place, packed, run(rank, packed), count=64), expected)
    assert torch.equal(run(sort, run(choose, packed, count=64), count=64), expected)
    assert torch.equal(run(sort, packed, count=64), expected)


def test_coarser_keys_are_those_of_larger_blocks(generator):
    logits = torch.randn(2, 5000, generator=generator)
    fine = order_maxima(logits, vocab_size=5000, block=64).keys
    assert torch.equal(coarser_keys(fine, ratio=8), order_maxima(logits, vocab_size=5000, block=512).keys)
    assert torch.equal(key_float(fine.amax(-1)), logits.amax(-1))


CHOSEN = 64


def hard_logits(rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Ties, both zeros, NaN, both infinities, a row of one value and a row of nothing but masked tokens."""
    logits = torch.randint(-9, 9, (rows, width), generator=generator).float() / 4
    for value in (-0.0, float("nan"), float("inf"), -float("inf")):
        logits[torch.rand(rows, width, generator=generator) < 0.01] = value
    logits[0], logits[1], logits[2, : width // 2] = 1.0, -float("inf"), float("nan")
    return logits


def found_apart(stage, *tensors, **static) -> torch.Tensor:
    packed = stage(*tensors, **static)
    return choose(packed, count=CHOSEN) if packed.shape[1] > CHOSEN else packed


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
        yield run(choosing, *tensors, **static, count=CHOSEN), found_apart(stage, *tensors, **static)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [33_000, 40_037])
def test_a_level_in_one_kernel_picks_the_same(vocab_size, dtype, generator):
    logits = hard_logits(5, vocab_size + 3, generator).to(dtype)
    picked = list(every_level(logits, vocab_size))
    assert len(picked) == 7
    for at_once, apart in picked:
        assert torch.equal(at_once, apart)
        assert at_once.shape == (5, CHOSEN)


def test_fewer_blocks_than_are_asked_for_are_all_picked(generator):
    keys = torch.randint(-5, 5, (3, 40), generator=generator, dtype=torch.int32)
    assert torch.equal(choose_blocks(keys, ratio=1, count=CHOSEN), all_coarser(keys, ratio=1))


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
