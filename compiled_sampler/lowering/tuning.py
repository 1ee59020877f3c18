"""How Inductor shapes the kernels of a stage: tiles, overlap, use of the cache; in C++ casts. No result depends on it.

Left alone, Inductor chooses between a few tilings by timing each. Kernels of two microseconds time alike, so what it
picks is chance, and up to six times slower than what stands here, measured on an H200.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch._inductor.config

from compiled_sampler.core.rows import gather_rows
from compiled_sampler.exact.row_race import draw_from_all, draw_raced
from compiled_sampler.exact.threshold import block_masses, known_threshold, row_masses, unknown_threshold, weigh
from compiled_sampler.passes.bounds import draw_settled, race_bounds, race_leaders
from compiled_sampler.passes.candidates import draw_from_candidates, draw_from_chosen
from compiled_sampler.passes.choosing import choose_blocks, choose_child_blocks, choose_child_tokens
from compiled_sampler.passes.law import candidate_law, probability_blocks, summed, weight_blocks, whole_weights
from compiled_sampler.passes.maxima import coarser_keys, mass_units, order_maxima, order_maxima_of, rows_of_blocks
from compiled_sampler.passes.narrowing import STORED_BLOCK, all_blocks, all_coarser, child_blocks, child_tokens
from compiled_sampler.passes.race import draw_from_blocks, first_from_blocks, race_maxima
from compiled_sampler.passes.ranking import choose, place, rank, sort
from compiled_sampler.pipeline.schedule import SMALL_ROWS, row_class
from compiled_sampler.speculation.acceptance import judge_drafts, settle
from compiled_sampler.speculation.emission import emit_matches
from compiled_sampler.speculation.residual import (
    draw_from_final_blocks,
    emit_from_final_blocks,
    emit_from_final_candidates,
    final_winners,
)

OVERLAPPED: frozenset[Any] = frozenset(
    {
        all_blocks,
        all_coarser,
        block_masses,
        child_blocks,
        child_tokens,
        choose,
        choose_blocks,
        choose_child_blocks,
        choose_child_tokens,
        coarser_keys,
        draw_from_all,
        draw_from_blocks,
        draw_from_candidates,
        draw_from_chosen,
        draw_raced,
        draw_settled,
        emit_from_final_blocks,
        emit_matches,
        final_winners,
        first_from_blocks,
        gather_rows,
        judge_drafts,
        order_maxima,
        order_maxima_of,
        place,
        probability_blocks,
        race_leaders,
        race_maxima,
        rank,
        row_masses,
        rows_of_blocks,
        settle,
        sort,
        unknown_threshold,
        weigh,
        weight_blocks,
        whole_weights,
    }
)
"""Stages that take part in programmatic dependent launch: 0.3 to 0.5 us less for each dependent kernel.

Inductor leaves out a kernel's wait where it reads nothing that the kernel before wrote; the kernel after would then not
wait for both. So only stages are named here all of whose kernels wait (a test reads their code), and of those only the
ones that it does not make slower.
"""

_APART_FROM: dict[Any, int] = dict.fromkeys(
    (block_masses, emit_matches, (order_maxima, STORED_BLOCK), (race_maxima, 512), weight_blocks), SMALL_ROWS + 1
)
"""Rows from which a stage, of some by tokens a block, takes no part: it or the next would take room from another.

A race in smaller blocks is over short rows, and takes part however many they are.
"""

PROMPT: frozenset[Any] = frozenset({gather_rows, rows_of_blocks})
"""Stages that let the next start before their own loads: 0.2 to 0.5 us less before a race; others may lose by it."""

STREAMED: frozenset[Any] = frozenset(
    {
        final_winners,
        order_maxima,
        order_maxima_of,
        probability_blocks,
        race_bounds,
        race_maxima,
        whole_weights,
    }
)
"""Passes over logits or probabilities that mark what they read as not to be kept in the cache."""

_ONE_FOR_ALL = frozenset(
    {
        all_coarser,
        candidate_law,
        child_blocks,
        child_tokens,
        choose,
        choose_blocks,
        choose_child_blocks,
        choose_child_tokens,
        draw_from_candidates,
        first_from_blocks,
        gather_rows,
        known_threshold,
        unknown_threshold,
        weigh,
    }
)
"""Stages whose kernels for few rows are as good for many: what is compiled once is not compiled twice."""

_CHOICE_TILE = (256, 4, 1)  # a row a thread block; eight warps take a fifth longer, of 512 rows
_ROW_TILE = (128, 4)  # two rows a thread block, where a row is one element of the kernel's output
TILES: dict[Any, tuple[int, ...]] = {
    all_coarser: (1024, 4),
    child_tokens: (1024, 4),
    choose_blocks: _CHOICE_TILE,
    choose_child_blocks: _CHOICE_TILE,
    choose_child_tokens: _CHOICE_TILE,
    coarser_keys: _ROW_TILE,
    draw_from_all: _ROW_TILE,
    draw_from_blocks: (128, 8),
    draw_from_chosen: (128, 2),
    draw_from_final_blocks: _ROW_TILE,
    draw_settled: _ROW_TILE,
    emit_from_final_blocks: (128, 1),
    emit_from_final_candidates: _ROW_TILE,
    emit_matches: (128, 1),
    final_winners: (512, 1),
    first_from_blocks: _ROW_TILE,
    judge_drafts: (128, 1),
    known_threshold: _ROW_TILE,
    mass_units: _ROW_TILE,
    order_maxima: (512, 4),
    (order_maxima, 1024): (256, 2),
    order_maxima_of: (256, 2),
    race_bounds: (1024, 1),
    race_leaders: (2048, 8, 1),
    (race_leaders, 256): (1024, 4, 1),
    race_maxima: (512, 4),
    (race_maxima, 256): (256, 1),
    rank: (4096, 4),
    row_masses: _ROW_TILE,
    rows_of_blocks: _ROW_TILE,
    sort: (128, 2),
    summed: _ROW_TILE,
    unknown_threshold: _ROW_TILE,
    probability_blocks: (2048, 2),
    weigh: (4096, 8),
    weight_blocks: (2048, 2),
    whole_weights: (1024, 1),
}
"""For several rows, the elements that a thread block reduces at once, and its warps; of some by tokens a block too.

Of blocks in slices, the elements of one slice. A third number is how many are reduced at once at least; else two.
"""

SINGLE_TILES: dict[Any, tuple[int, ...]] = {block_masses: (512, 2), order_maxima: (128, 1), race_maxima: (256, 1)}
"""The same for a single row."""

_ALONE: dict[Any, int] = {
    candidate_law: 1,
    draw_from_candidates: 1,
    emit_from_final_blocks: 2,
    emit_from_final_candidates: 1,
    emit_matches: 1,
    final_winners: 1,
    judge_drafts: 1,
    whole_weights: 1,
}
"""Warps of stages that reduce one block, or one row, in a thread block, for 2 to ``SMALL_ROWS`` rows."""


_NEVER_UNROLLED: frozenset[Any] = frozenset({emit_matches})
"""Stages whose reductions of a few elements stay reductions: what follows one writes the columns of a ``stack`` too.

Without any, Inductor writes the columns in a kernel of its own.
"""

_OF_ONE_KERNEL: frozenset[Any] = frozenset({choose_blocks, choose_child_blocks, choose_child_tokens, draw_from_chosen})
"""Stages with more operations than Inductor puts into a kernel if left alone."""


def made_for(stage: Any, rows: int, device: torch.device) -> int:
    """The number of rows that the kernels which serve ``rows`` rows are made for."""
    shared = stage in _ONE_FOR_ALL and device.type == "cuda"
    return row_class(min(rows, SMALL_ROWS) if shared else rows, device)


def overlaps(stage: Any, rows: int, block: int = 0) -> bool:
    """Whether the kernels of a stage start while the one before ends, and let the next do; arguments as ``shaped``."""
    return stage in OVERLAPPED and rows < _APART_FROM.get((stage, block), _APART_FROM.get(stage, rows + 1))


@contextmanager
def shaped(stage: Any, rows: int, on_gpu: bool, block: int = 0) -> Iterator[None]:
    """Within, Inductor makes the Triton kernels of a stage as the tables say, and C++ with whole casts.

    Args:
        stage: of ``drawing.py`` or ``pipeline.py``.
        rows: that the kernels are made for.
        on_gpu: whether they are Triton kernels.
        block: tokens a block, of a pass over the row.
    """
    with ExitStack() as shapes:
        for shape in _triton_shapes(stage, rows, block) if on_gpu else _cpp_shapes():
            shapes.enter_context(shape)
        yield


def _triton_shapes(stage: Any, rows: int, block: int) -> Iterator[AbstractContextManager[Any]]:
    tile = _tile(stage, rows, block)
    if tile is not None:
        yield importlib.import_module("compiled_sampler.lowering.fixed_tiles").fixed(*tile)
    if stage in STREAMED | PROMPT or (tile is not None and tile[2:] == (1,)):
        source = importlib.import_module("compiled_sampler.lowering.kernel_source")
        yield source.rewritten(streams=stage in STREAMED, prompts=stage in PROMPT)
    if stage in _NEVER_UNROLLED:
        yield torch._inductor.config.patch(unroll_reductions_threshold=1)
    if stage in _OF_ONE_KERNEL:
        yield torch._inductor.config.patch(max_fusion_size=512)


def _cpp_shapes() -> Iterator[AbstractContextManager[Any]]:
    yield importlib.import_module("compiled_sampler.lowering.vector_casts").whole_casts()


def _tile(stage: Any, rows: int, block: int) -> tuple[int, ...] | None:
    """Elements, warps and, where fewer than two may be reduced at once, how many at least; None where nothing says."""
    if _is_alone(stage, rows):
        return 1, _ALONE[stage], 1
    tiles = TILES if rows > 1 else SINGLE_TILES
    return tiles.get((stage, block), tiles.get(stage))


def _is_alone(stage: Any, rows: int) -> bool:
    return stage in _ALONE and 1 < rows <= SMALL_ROWS
