"""Tiles and overlap: what the table says is what Inductor generates, and no result depends on it."""

import re
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from compiled_sampler.core.rows import gather_rows
from compiled_sampler.core.stage import Run
from compiled_sampler.lowering import stage_code
from compiled_sampler.lowering.tuning import StageTuning, Tile, tuning_of
from compiled_sampler.passes.candidates import all_coarser, rank
from compiled_sampler.passes.law import unfiltered_weights
from compiled_sampler.passes.maxima import order_maxima
from compiled_sampler.passes.race import race_maxima
from compiled_sampler.pipeline.chunks import without_kernels
from compiled_sampler.pipeline.schedule import LARGE_ROWS, SMALL_ROWS
from tests.for_a_gpu import rows_of_one_request, tiles
from tests.tiers import tiers
from tools.kernels.launches import for_a_gpu, generated
from tools.kernels.steps import step_of


def tiles_of(stage, *tensors, tiled=True, **static):
    """``tiles`` of the code that Inductor generates for a stage."""
    with for_a_gpu(), nullcontext() if tiled else mock.patch.object(stage_code, "is_gpu", return_value=False):
        (found,) = generated(lambda run: run(stage, *tensors, **static), "triton")
    assert found.code is not None
    return tiles(found.code)


PACKED, X = torch.arange(8 * 512).view(8, 512), torch.randn(8, 2000)
BY_BITS = {"vocab_size": 2000, "by_bits": True}
TILED = {
    "a tile": (rank, PACKED, {}, [("8", "4")]),
    "another": (all_coarser, torch.zeros(8, 2374, dtype=torch.int32), {"ratio": 8}, [("128", "4")]),
    "of its block": (order_maxima, X, {**BY_BITS, "block": 1024, "slices": 8}, [("2", "2")]),
    "of other blocks": (order_maxima, X, {**BY_BITS, "block": 64, "slices": 4}, [("32", "4")]),
    "none of one row": (rank, PACKED[:1], {}, []),
    "none of what registers do not hold": (
        *(order_maxima, torch.randn(8, 40_000), {"vocab_size": 40_000, "block": 65_536}),
        [],
    ),
}
"""A stage, its tensor and arguments, and the tiles of the table: XBLOCK and warps."""


@pytest.mark.parametrize("what", TILED)
def test_kernels_have_the_tiles_of_the_table(what):
    stage, tensor, static, wanted = TILED[what]
    assert tiles_of(stage, tensor, **static) == wanted
    assert tiles_of(stage, tensor, tiled=False, **static) == []


def test_a_single_row_has_tiles_of_its_own():
    assert tuning_of(race_maxima).tile_of_one_row == Tile(256, 1)
    rows = gather_rows(rows_of_one_request(1, 2000), stream=0)
    assert tiles_of(race_maxima, torch.randn(1, 2000), rows, None, None, vocab_size=2000, block=256) == [("2", "1")]


def test_a_few_rows_have_their_blocks_weighed_each_alone(monkeypatch):
    row_slots = rows_of_one_request(2, 2000)
    tensors = torch.randn(2, 2000), row_slots.slots, torch.zeros(2, 2, dtype=torch.int32), row_slots
    static = {"vocab_size": 2000, "block": 1024, "filters_min_p": False}
    assert tuning_of(unfiltered_weights).tile == Tile(1024, 1)
    monkeypatch.setattr(StageTuning, "rows_hint", lambda *_: LARGE_ROWS)
    assert tiles_of(unfiltered_weights, *tensors, **static) == [("2", "1")]
    monkeypatch.setattr(StageTuning, "rows_hint", lambda *_: SMALL_ROWS)
    assert tiles_of(unfiltered_weights, *tensors, **static) == [("1", "1")]


def test_classes_of_rows_share_kernels_on_a_gpu_alone():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    shared = StageTuning(shared_by_row_classes=True)
    assert [shared.rows_hint(rows, cuda) for rows in (1, 2, 32, 33, 512)] == [1, 32, 32, 32, 32]
    assert [StageTuning().rows_hint(rows, cuda) for rows in (1, 2, 32, 33, 512)] == [1, 32, 32, 128, 128]
    assert shared.rows_hint(2, cpu) == LARGE_ROWS
    same = StageTuning(tile=Tile(128, 2), overlap_rows_by_block={64: SMALL_ROWS}, same_by_row_classes=True)
    assert [same.rows_hint(rows, cuda, 256) for rows in (1, 2, 32, 33, 512)] == [1, 32, 32, 32, 32]
    assert [same.rows_hint(rows, cuda, 64) for rows in (1, 2, 32, 33, 512)] == [1, 32, 32, 128, 128]
    assert same.rows_hint(2, cpu) == LARGE_ROWS


@pytest.mark.parametrize(
    ("mode", "stages"),
    tiers(
        [("greedy", ["order_maxima"])],
        [
            ("greedy", ["order_maxima"]),
            ("min_p", ["race_bounds", "race_leaders", "draw_from_leaders"]),
            ("top_k_top_p[64]", ["draw_from_unordered_candidates"]),
            ("full", ["sort", "draw_from_candidates_and_winners"]),
        ],
    ),
)
def test_stages_that_are_declared_the_same_have_the_same_code_for_few_and_for_many_rows(mode, stages, monkeypatch):
    codes = []
    with for_a_gpu():
        step = step_of(mode, 40, 60_000)
    for rows in (SMALL_ROWS, LARGE_ROWS):
        monkeypatch.setattr(StageTuning, "rows_hint", lambda *_, rows=rows: rows)
        with for_a_gpu():
            codes.append({each.stage: each.code for each in generated(lambda run: step(only(stages, run)), "triton")})
    few, many = ([(tiles(made[stage]), bodies(made[stage])) for stage in stages] for made in codes)
    assert few == many
    assert all(body for _, body in few)


def only(stages, run):
    """A ``run`` for which code is generated for some stages alone."""

    def ran(stage, /, *tensors, **static):
        called = run if stage.__name__ in stages else without_kernels
        return called(stage, *tensors, **static)

    return Run(ran, fuses=True)


def bodies(code):
    """The kernels of generated code, without what is told of their sizes."""
    return re.findall(r"^@triton\.jit\n(.*?)(?=^@triton_heuristics|^''')", code, re.M | re.S)
