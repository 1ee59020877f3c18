"""The tuning of every stage, one declaration each: how Inductor shapes its kernels. No result depends on it.

A stage without an entry is left to Inductor, which chooses between a few tilings by timing each. Kernels of two
microseconds time alike, so what it picks is chance, and up to six times slower than what is declared here, measured on
an H200.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from compiled_sampler.core.rows import gather_rows
from compiled_sampler.edits.bad_words import without_bad_words
from compiled_sampler.edits.bias import write_biases
from compiled_sampler.edits.changes import take_back
from compiled_sampler.edits.dry import without_repetitions
from compiled_sampler.edits.min_tokens import without_stops
from compiled_sampler.edits.penalties import write_penalties
from compiled_sampler.edits.recording import cut_at_stop, record_drafts, record_draws, record_ends, with_finished
from compiled_sampler.exact.row_race import (
    IN_TORCH,
    draw_from_candidates_and_winners,
    draw_from_winners,
    race_and_weigh,
    race_beyond_candidates,
    race_rows,
    race_top_k,
)
from compiled_sampler.exact.threshold import (
    block_masses,
    flag_exceeding_rows,
    row_masses,
    search_in_order,
    search_threshold,
    threshold_from_candidates,
    threshold_without_candidates,
)
from compiled_sampler.passes.block_laws import law_in_blocks, law_scale, sum_block_laws
from compiled_sampler.passes.bounds import draw_from_leaders, race_bounds, race_leaders, race_masked_bounds
from compiled_sampler.passes.candidates import (
    STORED_BLOCK,
    all_blocks,
    all_coarser,
    child_blocks,
    child_tokens,
    choose,
    choose_blocks,
    choose_child_blocks,
    choose_child_tokens,
    place,
    rank,
    select,
    sort,
)
from compiled_sampler.passes.kept import cut_of_drawn, kept_in_blocks, sum_kept
from compiled_sampler.passes.law import (
    candidate_law,
    probability_blocks,
    sum_law,
    unfiltered_weights,
    weight_blocks,
)
from compiled_sampler.passes.logprobs import logprobs_from_kept, tokens_before, top_logprobs
from compiled_sampler.passes.maxima import (
    coarser_keys,
    customized_with_maxima,
    masked_with_maxima,
    mass_units,
    order_maxima,
    order_maxima_of,
    rows_of_blocks,
)
from compiled_sampler.passes.race import (
    draw_and_keep,
    draw_from_blocks,
    draw_from_candidates,
    draw_from_unordered_candidates,
    first_from_blocks,
    race_maxima,
)
from compiled_sampler.passes.shards import draw_from_told, first_of_shard, winners_of_blocks, winners_of_leaders
from compiled_sampler.passes.typical_p import with_digit
from compiled_sampler.pipeline.schedule import LARGE_ROWS, SMALL_ROWS, is_gpu, row_class
from compiled_sampler.speculation.acceptance import judge_drafts
from compiled_sampler.speculation.emission import emit_matches, final_rows
from compiled_sampler.speculation.residual import (
    draw_from_final_blocks,
    emit_from_final_blocks,
    emit_from_final_candidates,
    final_winners,
)

Stage = Callable[..., Any]

NEVER, ALWAYS = 0, sys.maxsize
"""Values of ``StageTuning.overlap_rows``."""

_FUSED_OPERATIONS = 512  # more than any stage has


class Tile(NamedTuple):
    """What a thread block of a Triton kernel reduces."""

    elements: int
    """Elements that are reduced at once; of blocks in slices, the elements of one slice."""
    warps: int
    least: int = 2
    """Reductions that are done at once at least."""


def _nothing() -> Mapping[int, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class StageTuning:
    """How the kernels of a stage are made; the defaults leave everything to Inductor.

    Mappings ``..._by_block`` hold what differs for a stage in blocks, by tokens a block.
    """

    tile: Tile | None = None
    """For several rows; None lets Inductor time tilings of its own."""
    tile_by_block: Mapping[int, Tile] = field(default_factory=_nothing)
    tile_of_one_row: Tile | None = None
    """For a single row."""
    warps_of_few_rows: int | None = None
    """For 2 to ``SMALL_ROWS`` rows: the warps of a thread block that reduces one row, or one block of it, alone."""
    overlap_rows: int = NEVER
    """Rows up to which the stage takes part in programmatic dependent launch: 0.3 to 0.5 us less a dependent kernel.

    Inductor leaves out a kernel's wait where it reads nothing that the kernel before wrote; the kernel after would then
    not wait for both. So only stages take part all of whose kernels wait (a test reads their code), and of those only
    the ones that it does not make slower.
    """
    overlap_rows_by_block: Mapping[int, int] = field(default_factory=_nothing)
    streams: bool = False
    """Whether what it reads of logits or probabilities is marked as not to be kept in the cache."""
    launches_next_promptly: bool = False
    """Whether the next kernel may start before the loads of this one: 0.2 to 0.5 us less before a race; others may lose
    by it."""
    ahead_rows: int = NEVER
    """Rows up to which inputs of one dimension are read before the kernel before has ended, which must not write them.

    Two reads that follow from each other take 0.15 to 0.4 us otherwise. ``rows_of_blocks`` of several rows loses by it.
    """
    shared_by_row_classes: bool = False
    """Whether kernels for few rows are as good for many on a GPU: compiled once instead of twice."""
    same_by_row_classes: bool = False
    """Whether kernels for few rows and for many are the same code where tile and overlap are: compiled once too."""
    keeps_reductions: bool = False
    """Whether reductions of a few elements stay reductions: what follows one writes the columns of a ``stack`` too.

    Without any, Inductor writes the columns in a kernel of its own.
    """
    fuses_everything: bool = False
    """Whether more operations are put into one kernel than Inductor does if left alone."""
    one_axis: bool = False
    """Whether tiles of kernels without a reduction have one axis: several take more registers, and fewer threads."""
    writes: bool = False
    """Whether the stage writes into tensors that it gets, which may share memory; otherwise it is pure."""
    opaque: bool = False
    """Whether Inductor does not see the stage: it launches hand-written kernels or calls numpy."""
    num_kernels: int = 1
    """Kernels, one after the other, of an opaque stage on a GPU."""

    def rows_hint(self, rows: int, device: torch.device, block: int = 0) -> int:
        """The number of rows for which the kernels that serve ``rows`` rows are made; ``block`` as ``tile_for``."""
        shared = (self.shared_by_row_classes or self._is_same(block)) and is_gpu(device)
        return row_class(min(rows, SMALL_ROWS) if shared else rows, device)

    def _is_same(self, block: int) -> bool:
        """Whether few and many rows have the same code; arguments as ``tile_for``."""
        few, many = ((self.tile_for(rows, block), self.overlaps(rows, block)) for rows in (SMALL_ROWS, LARGE_ROWS))
        return self.same_by_row_classes and few == many

    def tile_for(self, rows: int, block: int = 0) -> Tile | None:
        """The tile of a stage's Triton kernels for a ``rows_hint``; None where Inductor times tilings of its own."""
        # block: tokens a block; 0 for a stage without blocks.
        if rows == 1:
            return self.tile_of_one_row
        if self.warps_of_few_rows is not None and rows <= SMALL_ROWS:
            return Tile(1, self.warps_of_few_rows, 1)
        return self.tile_by_block.get(block, self.tile)

    def overlaps(self, rows: int, block: int = 0) -> bool:
        """Whether kernels start while the one before ends, and let the next do; arguments as ``tile_for``."""
        return rows <= self.overlap_rows_by_block.get(block, self.overlap_rows)

    def options(self, rows: int, block: int = 0, *, on_gpu: bool) -> dict[str, Any]:
        """Inductor's own options for a stage; ``rows`` and ``block`` as ``tile_for``."""
        options: dict[str, Any] = {"triton.enable_pdl": self.overlaps(rows, block)}
        if on_gpu and self.keeps_reductions:
            options["unroll_reductions_threshold"] = 1
        if on_gpu and (self.one_axis or self.tile_for(rows, block) is not None):
            # a tile has one size: of some V, such as 4,096, Inductor would choose two axes, and fail
            options["triton.max_tiles"] = 1
        if on_gpu and self.fuses_everything:
            options["max_fusion_size"] = _FUSED_OPERATIONS
        return options


_ONE_ROW = Tile(256, 4, 1)  # a row a thread block; eight warps take a fifth longer, of 512 rows
_TWO_ROWS = Tile(128, 4)  # two rows a thread block, where a row is one element of the kernel's output

TUNING: Mapping[Stage, StageTuning] = {
    # core/rows.py
    gather_rows: StageTuning(overlap_rows=ALWAYS, launches_next_promptly=True, shared_by_row_classes=True),
    # edits
    write_biases: StageTuning(shared_by_row_classes=True, one_axis=True, writes=True, overlap_rows=ALWAYS),
    write_penalties: StageTuning(shared_by_row_classes=True, one_axis=True, writes=True, overlap_rows=ALWAYS),
    take_back: StageTuning(shared_by_row_classes=True, one_axis=True, writes=True, overlap_rows=ALWAYS),
    without_stops: StageTuning(shared_by_row_classes=True),
    without_bad_words: StageTuning(shared_by_row_classes=True),
    without_repetitions: StageTuning(shared_by_row_classes=True),
    record_draws: StageTuning(
        tile=Tile(2048, 8, 1), shared_by_row_classes=True, one_axis=True, writes=True, overlap_rows=ALWAYS
    ),
    record_drafts: StageTuning(tile=Tile(2048, 8, 1), shared_by_row_classes=True, one_axis=True, writes=True),
    record_ends: StageTuning(tile=Tile(2048, 8, 1), shared_by_row_classes=True, one_axis=True, writes=True),
    with_finished: StageTuning(shared_by_row_classes=True, overlap_rows=ALWAYS),
    cut_at_stop: StageTuning(shared_by_row_classes=True),
    # passes/maxima.py, of copies
    masked_with_maxima: StageTuning(tile=Tile(2048, 4), tile_of_one_row=Tile(128, 1), streams=True),
    customized_with_maxima: StageTuning(tile=Tile(2048, 4), tile_of_one_row=Tile(128, 1)),
    # passes/maxima.py
    order_maxima: StageTuning(
        tile=Tile(512, 4),
        tile_by_block={1024: Tile(256, 2)},
        tile_of_one_row=Tile(128, 1),
        overlap_rows=ALWAYS,
        overlap_rows_by_block={STORED_BLOCK: SMALL_ROWS},
        streams=True,
        same_by_row_classes=True,
    ),
    order_maxima_of: StageTuning(tile=Tile(256, 2), overlap_rows=ALWAYS, streams=True),
    coarser_keys: StageTuning(tile=_TWO_ROWS, overlap_rows=ALWAYS),
    rows_of_blocks: StageTuning(
        tile=_TWO_ROWS, overlap_rows=ALWAYS, launches_next_promptly=True, ahead_rows=SMALL_ROWS
    ),
    mass_units: StageTuning(tile=_TWO_ROWS),
    # passes/candidates.py
    all_coarser: StageTuning(tile=Tile(1024, 4), overlap_rows=ALWAYS, shared_by_row_classes=True),
    all_blocks: StageTuning(overlap_rows=ALWAYS),
    child_blocks: StageTuning(overlap_rows=ALWAYS, shared_by_row_classes=True),
    child_tokens: StageTuning(tile=Tile(1024, 4), overlap_rows=ALWAYS, shared_by_row_classes=True),
    # passes/candidates.py, a level in one kernel
    choose_blocks: StageTuning(tile=_ONE_ROW, overlap_rows=ALWAYS, shared_by_row_classes=True, fuses_everything=True),
    choose_child_blocks: StageTuning(
        tile=_ONE_ROW, overlap_rows=ALWAYS, shared_by_row_classes=True, fuses_everything=True
    ),
    choose_child_tokens: StageTuning(
        tile=_ONE_ROW, overlap_rows=ALWAYS, shared_by_row_classes=True, fuses_everything=True
    ),
    # passes/candidates.py, the largest keys
    sort: StageTuning(tile=Tile(128, 2), overlap_rows=ALWAYS, same_by_row_classes=True),
    rank: StageTuning(tile=Tile(4096, 4), overlap_rows=ALWAYS),
    place: StageTuning(overlap_rows=ALWAYS),
    choose: StageTuning(overlap_rows=ALWAYS, shared_by_row_classes=True),
    select: StageTuning(opaque=True),
    # passes/race.py, of candidates
    draw_from_candidates: StageTuning(warps_of_few_rows=1, overlap_rows=ALWAYS, shared_by_row_classes=True),
    draw_from_unordered_candidates: StageTuning(
        tile=Tile(128, 2), overlap_rows=ALWAYS, fuses_everything=True, same_by_row_classes=True
    ),
    draw_and_keep: StageTuning(tile=Tile(128, 2), fuses_everything=True),
    # passes/bounds.py
    race_bounds: StageTuning(tile=Tile(1024, 1), streams=True, same_by_row_classes=True),
    race_masked_bounds: StageTuning(tile=Tile(128, 1), streams=True, same_by_row_classes=True),
    race_leaders: StageTuning(
        tile=Tile(2048, 8, 1), tile_by_block={256: Tile(1024, 4, 1)}, overlap_rows=ALWAYS, same_by_row_classes=True
    ),
    draw_from_leaders: StageTuning(tile=_TWO_ROWS, overlap_rows=ALWAYS, same_by_row_classes=True),
    # passes/race.py
    race_maxima: StageTuning(
        tile=Tile(512, 4),
        tile_by_block={256: Tile(256, 1)},
        tile_of_one_row=Tile(256, 1),
        overlap_rows=ALWAYS,
        overlap_rows_by_block={512: SMALL_ROWS},
        streams=True,
    ),
    draw_from_blocks: StageTuning(tile=Tile(128, 8), overlap_rows=ALWAYS),
    first_from_blocks: StageTuning(
        tile=_TWO_ROWS,
        tile_by_block={STORED_BLOCK: Tile(2048, 8, 1)},  # 16 times as many blocks
        overlap_rows=ALWAYS,
        ahead_rows=ALWAYS,
        shared_by_row_classes=True,
    ),
    # passes/shards.py; no kernel beside a collective takes part in programmatic dependent launch
    first_of_shard: StageTuning(tile=_TWO_ROWS, shared_by_row_classes=True),
    winners_of_blocks: StageTuning(tile=Tile(128, 8)),
    winners_of_leaders: StageTuning(tile=_TWO_ROWS, same_by_row_classes=True),
    draw_from_told: StageTuning(tile=Tile(128, 2), fuses_everything=True, same_by_row_classes=True),
    # passes/law.py
    candidate_law: StageTuning(warps_of_few_rows=1, shared_by_row_classes=True),
    unfiltered_weights: StageTuning(tile=Tile(1024, 1), warps_of_few_rows=1, overlap_rows=ALWAYS, streams=True),
    weight_blocks: StageTuning(tile=Tile(2048, 2), overlap_rows=SMALL_ROWS),
    probability_blocks: StageTuning(tile=Tile(2048, 2), overlap_rows=ALWAYS, streams=True),
    sum_law: StageTuning(tile=_TWO_ROWS),
    # logprobs
    law_scale: StageTuning(overlap_rows=ALWAYS, launches_next_promptly=True, shared_by_row_classes=True),
    law_in_blocks: StageTuning(tile=Tile(1024, 1), streams=True, overlap_rows=ALWAYS),
    sum_block_laws: StageTuning(tile=_TWO_ROWS, overlap_rows=ALWAYS),
    cut_of_drawn: StageTuning(overlap_rows=ALWAYS, shared_by_row_classes=True),
    kept_in_blocks: StageTuning(tile=Tile(1024, 1), streams=True, overlap_rows=ALWAYS),
    sum_kept: StageTuning(tile=_TWO_ROWS),
    tokens_before: StageTuning(
        tile=Tile(512, 4), tile_by_block={1024: Tile(256, 2)}, streams=True, overlap_rows=ALWAYS
    ),
    top_logprobs: StageTuning(shared_by_row_classes=True),
    logprobs_from_kept: StageTuning(shared_by_row_classes=True, overlap_rows=ALWAYS),
    # passes/typical_p.py
    with_digit: StageTuning(tile=Tile(2048, 8, 1)),
    # exact/threshold.py
    block_masses: StageTuning(tile_of_one_row=Tile(512, 2), overlap_rows=SMALL_ROWS),
    flag_exceeding_rows: StageTuning(tile=Tile(4096, 8), overlap_rows=ALWAYS, shared_by_row_classes=True),
    row_masses: StageTuning(tile=_TWO_ROWS, overlap_rows=ALWAYS),
    threshold_from_candidates: StageTuning(tile=_TWO_ROWS, shared_by_row_classes=True),
    threshold_without_candidates: StageTuning(tile=_TWO_ROWS, overlap_rows=ALWAYS, shared_by_row_classes=True),
    search_threshold: StageTuning(opaque=True, num_kernels=3),
    search_in_order: StageTuning(opaque=True),
    # exact/row_race.py
    race_rows: StageTuning(opaque=True),
    race_and_weigh: StageTuning(opaque=True),
    race_beyond_candidates: StageTuning(opaque=True, num_kernels=4),
    race_top_k: StageTuning(opaque=True, num_kernels=4),
    draw_from_winners: StageTuning(overlap_rows=ALWAYS),
    draw_from_candidates_and_winners: StageTuning(tile=_TWO_ROWS, overlap_rows=ALWAYS, same_by_row_classes=True),
    # speculation/acceptance.py
    judge_drafts: StageTuning(tile=Tile(128, 1), warps_of_few_rows=1, overlap_rows=ALWAYS),
    final_rows: StageTuning(overlap_rows=ALWAYS),
    # speculation/emission.py
    emit_matches: StageTuning(tile=Tile(128, 1), warps_of_few_rows=1, overlap_rows=SMALL_ROWS, keeps_reductions=True),
    # speculation/residual.py
    emit_from_final_candidates: StageTuning(tile=_TWO_ROWS, warps_of_few_rows=1),
    final_winners: StageTuning(tile=Tile(512, 1), warps_of_few_rows=1, overlap_rows=ALWAYS, streams=True),
    draw_from_final_blocks: StageTuning(tile=_TWO_ROWS),
    emit_from_final_blocks: StageTuning(tile=Tile(128, 1), warps_of_few_rows=2, overlap_rows=ALWAYS),
}
"""By stage. A race in blocks of 256 tokens is over short rows, and overlaps however many they are."""

_LEFT_TO_INDUCTOR = StageTuning()


def tuning_of(stage: Stage) -> StageTuning:
    """The declaration of a stage, or defaults that leave everything to Inductor."""
    return TUNING.get(stage, _LEFT_TO_INDUCTOR)


def is_hand_written(stage: Stage) -> bool:
    """Whether a stage has kernels of its own on a GPU, which torch stands in for until they are compiled."""
    return stage in IN_TORCH
