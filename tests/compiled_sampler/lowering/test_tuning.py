"""Tiles and overlap: what the table says is what Inductor generates, and no result depends on it."""

import re
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from compiled_sampler.core.rows import Entries, gather_rows
from compiled_sampler.lowering import compiled_stages as lowering
from compiled_sampler.lowering.tuning import _ALONE, OVERLAPPED, SINGLE_TILES, STREAMED, TILES, overlaps
from compiled_sampler.params import SamplingParams
from compiled_sampler.passes.choosing import choose_blocks, choose_child_blocks, choose_child_tokens
from compiled_sampler.passes.law import whole_weights
from compiled_sampler.passes.maxima import order_maxima
from compiled_sampler.passes.narrowing import all_coarser
from compiled_sampler.passes.race import race_maxima
from compiled_sampler.passes.ranking import rank
from compiled_sampler.pipeline.schedule import LARGE_ROWS, SMALL_ROWS
from tests.builders import slot_table
from tests.for_a_gpu import for_a_gpu
from tools.kernels.launches import generated


def tiles_of(stage, *tensors, tiled=True, **static) -> list[tuple[str, str]]:
    """XBLOCK and warps of each kernel that Inductor generates for a stage; none where it would time several tilings."""
    pytest.importorskip("triton")
    with for_a_gpu(), nullcontext() if tiled else mock.patch.object(lowering, "is_gpu", return_value=False):
        (found,) = generated(lambda run: run(stage, *tensors, **static), "triton")
    assert found.code is not None
    return re.findall(r"config=\{'XBLOCK': (\d+), 'num_warps': (\d+)", found.code)


def test_kernels_of_several_rows_have_the_tiles_of_the_table():
    packed = torch.arange(8 * 512).view(8, 512)
    assert TILES[rank] == (4096, 4)
    assert tiles_of(rank, packed) == [("8", "4")]
    assert tiles_of(rank, packed, tiled=False) == []
    assert TILES[all_coarser] == (1024, 4)
    assert tiles_of(all_coarser, torch.zeros(8, 2374, dtype=torch.int32), ratio=8) == [("128", "4")]


def test_a_pass_may_have_tiles_for_its_blocks():
    x = torch.randn(8, 2000)
    assert (TILES[order_maxima, 1024], TILES[order_maxima]) == ((256, 2), (512, 4))
    assert tiles_of(order_maxima, x, vocab_size=2000, block=1024) == [("2", "2")]
    assert tiles_of(order_maxima, x, vocab_size=2000, block=64) == [("32", "4")]


def test_a_single_row_has_tiles_of_its_own():
    assert tiles_of(rank, torch.arange(512).view(1, 512)) == []
    assert SINGLE_TILES[race_maxima] == (256, 1)
    table, slots = slot_table([SamplingParams(seed=1)], 2000), torch.zeros(1, dtype=torch.int64)
    rows = gather_rows(Entries(table, slots, slots), stream=0)
    assert tiles_of(race_maxima, torch.randn(1, 2000), rows, None, None, vocab_size=2000, block=256) == [("2", "1")]


def test_a_few_rows_have_their_blocks_weighed_each_alone(monkeypatch):
    table, slots = slot_table([SamplingParams(seed=1)] * 2, 2000), torch.zeros(2, dtype=torch.int64)
    tensors = torch.randn(2, 2000), slots, torch.zeros(2, 2, dtype=torch.int32), Entries(table, slots, slots)
    static = {"vocab_size": 2000, "block": 1024, "filters_min_p": False}
    assert TILES[whole_weights] == (1024, 1)
    assert tiles_of(whole_weights, *tensors, **static) == [("2", "1")]
    monkeypatch.setattr(lowering, "made_for", lambda *_: SMALL_ROWS)
    assert tiles_of(whole_weights, *tensors, **static) == [("1", "1")]


def test_any_stage_may_reduce_the_rows_of_a_small_batch_each_alone(monkeypatch):
    packed = torch.arange(8 * 512).view(8, 512)
    monkeypatch.setitem(_ALONE, rank, 2)
    monkeypatch.setattr(lowering, "made_for", lambda *_: LARGE_ROWS)
    assert tiles_of(rank, packed) == [("8", "4")]
    monkeypatch.setattr(lowering, "made_for", lambda *_: SMALL_ROWS)
    assert rank not in STREAMED
    assert tiles_of(rank, packed) == [("1", "2")]


def test_a_level_in_one_kernel_has_a_thread_block_for_each_row():
    keys, parents = torch.zeros(128, 2374, dtype=torch.int32), torch.zeros(128, 64, dtype=torch.int64)
    tokens = {"vocab_size": 2000, "ratio": 8, "count": 64}
    assert tiles_of(choose_blocks, keys, ratio=8, count=64) == [("1", "4")]
    assert tiles_of(choose_blocks, keys[:, :2004], ratio=8, count=64) == [("1", "4")]
    assert tiles_of(choose_child_blocks, keys, parents, ratio=8, size=8, count=64) == [("1", "4")]
    assert tiles_of(choose_child_tokens, torch.zeros(128, 2000), parents, **tokens, size=8) == [("1", "4")]


def test_a_reduction_too_long_for_registers_is_left_to_inductor():
    assert tiles_of(order_maxima, torch.randn(8, 40_000), vocab_size=40_000, block=65_536) == []


def test_passes_over_many_long_rows_do_not_overlap():
    assert overlaps(race_maxima, 1)
    assert overlaps(race_maxima, SMALL_ROWS, 512)
    assert not overlaps(race_maxima, LARGE_ROWS, 512)
    assert not overlaps(race_maxima, 14_200, 512)
    assert overlaps(race_maxima, LARGE_ROWS, 256)
    assert overlaps(order_maxima, LARGE_ROWS, 1024)
    assert not overlaps(order_maxima, LARGE_ROWS, 64)
    assert overlaps(rank, LARGE_ROWS)
    assert not overlaps(lambda x: x, 1)


def test_every_tile_is_a_power_of_two():
    assert all(
        elements & (elements - 1) == 0 and warps in (1, 2, 4, 8, 16)
        for elements, warps, *_ in [*TILES.values(), *SINGLE_TILES.values()]
    )
    assert OVERLAPPED


def test_a_tiling_lasts_as_long_as_its_stage_is_made():
    from torch._inductor.virtualized import V

    before = type(V.choices)
    tiles_of(rank, torch.arange(8 * 512).view(8, 512))
    assert type(V.choices) is before
