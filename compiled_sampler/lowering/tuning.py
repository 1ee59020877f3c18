"""The tuning of every stage, one declaration each: how Inductor shapes its kernels. No result depends on it.

A stage without an entry is left to Inductor, which chooses between a few tilings by timing each. Kernels of two
microseconds time alike, so what it picks is chance, and up to six times slower than what is declared here, measured on
an H200.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from compiled_sampler.core.rows import gather_rows
from compiled_sampler.edits import bad_words, bias, changes, dry, min_tokens, penalties, recording
from compiled_sampler.exact import row_race, threshold
from compiled_sampler.passes import (
    bounds,
    candidates,
    kept,
    law,
    logprobs,
    maxima,
    race,
    row_filters,
    shards,
)
from compiled_sampler.pipeline.schedule import LARGE_ROWS, SMALL_ROWS, is_gpu, row_class
from compiled_sampler.speculation import acceptance, emission, residual

Stage = Callable[..., Any]

NEVER, ALWAYS = 0, sys.maxsize
"""Values of ``StageTuning.overlap_rows``."""

_FUSED_OPERATIONS = 512  # more than any stage has


class Tile(NamedTuple):
    """What a thread block of a Triton kernel reduces."""

    elements: int  # elements that are reduced at once; of blocks in slices, the elements of one slice
    warps: int
    least: int = 2  # reductions that are done at once at least; 0 for a stage without any: elements a thread block


@dataclass(frozen=True, kw_only=True)
class StageTuning:
    """How the kernels of a stage are made; the defaults leave everything to Inductor.

    Mappings ``..._by_block`` hold what differs for a stage in blocks, by tokens a block.
    """

    tile: Tile | None = None
    """For several rows; None lets Inductor time tilings of its own."""
    tile_by_block: Mapping[int, Tile] = field(default_factory=dict)
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
    overlap_rows_by_block: Mapping[int, int] = field(default_factory=dict)
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
_NO_REDUCTION = Tile(128, 4, 0)  # or 256, as Inductor chose by chance: 8 rows of k 50 + p .9 took 17.9 or 19.4 us
_TWO_ROWS = Tile(128, 4)  # two rows a thread block, where a row is one element of the kernel's output
# a level of candidates in one kernel
_ONE_LEVEL = StageTuning(tile=_ONE_ROW, overlap_rows=ALWAYS, shared_by_row_classes=True, fuses_everything=True)

TUNING: Mapping[Stage, StageTuning] = {
    gather_rows: StageTuning(overlap_rows=ALWAYS, launches_next_promptly=True, shared_by_row_classes=True),
    bias.write_biases: StageTuning(shared_by_row_classes=True, one_axis=True, writes=True, overlap_rows=ALWAYS),
    penalties.write_penalties: StageTuning(shared_by_row_classes=True, one_axis=True, writes=True, overlap_rows=ALWAYS),
    changes.take_back: StageTuning(shared_by_row_classes=True, one_axis=True, writes=True, overlap_rows=ALWAYS),
    min_tokens.without_stops: StageTuning(shared_by_row_classes=True),
    bad_words.without_bad_words: StageTuning(shared_by_row_classes=True),
    dry.without_repetitions: StageTuning(shared_by_row_classes=True),
    recording.record_draws: StageTuning(
        tile=Tile(2048, 8, 1), shared_by_row_classes=True, one_axis=True, writes=True, overlap_rows=ALWAYS
    ),
    recording.record_drafts: StageTuning(tile=Tile(2048, 8, 1), shared_by_row_classes=True, one_axis=True, writes=True),
    recording.record_ends: StageTuning(tile=Tile(2048, 8, 1), shared_by_row_classes=True, one_axis=True, writes=True),
    recording.with_finished: StageTuning(shared_by_row_classes=True, overlap_rows=ALWAYS),
    recording.cut_at_stop: StageTuning(shared_by_row_classes=True),
    maxima.masked_with_maxima: StageTuning(tile=Tile(2048, 4), tile_of_one_row=Tile(128, 1), streams=True),
    maxima.customized_with_maxima: StageTuning(tile=Tile(2048, 4), tile_of_one_row=Tile(128, 1)),
    maxima.order_maxima: StageTuning(
        tile=Tile(512, 4),
        tile_by_block={1024: Tile(256, 2)},
        tile_of_one_row=Tile(128, 1),
        overlap_rows=ALWAYS,
        overlap_rows_by_block={candidates.STORED_BLOCK: SMALL_ROWS},
        streams=True,
        same_by_row_classes=True,
    ),
    maxima.order_maxima_of: StageTuning(tile=Tile(256, 2), overlap_rows=ALWAYS, streams=True),
    maxima.coarser_keys: StageTuning(tile=_TWO_ROWS, overlap_rows=ALWAYS),
    maxima.rows_of_blocks: StageTuning(
        tile=_TWO_ROWS, overlap_rows=ALWAYS, launches_next_promptly=True, ahead_rows=SMALL_ROWS
    ),
    maxima.mass_units: StageTuning(tile=_TWO_ROWS),
    candidates.all_coarser: StageTuning(tile=Tile(1024, 4), overlap_rows=ALWAYS, shared_by_row_classes=True),
    candidates.all_blocks: StageTuning(overlap_rows=ALWAYS),
    candidates.child_blocks: StageTuning(
        tile=_NO_REDUCTION, tile_of_one_row=_NO_REDUCTION, overlap_rows=ALWAYS, shared_by_row_classes=True
    ),
    candidates.child_tokens: StageTuning(tile=Tile(1024, 4), overlap_rows=ALWAYS, shared_by_row_classes=True),
    candidates.choose_blocks: _ONE_LEVEL,
    candidates.choose_child_blocks: _ONE_LEVEL,
    candidates.choose_child_tokens: _ONE_LEVEL,
    candidates.sort: StageTuning(tile=Tile(128, 2), overlap_rows=ALWAYS, same_by_row_classes=True),
    candidates.rank: StageTuning(tile=Tile(4096, 4), overlap_rows=ALWAYS),
    candidates.place: StageTuning(tile=_NO_REDUCTION, tile_of_one_row=_NO_REDUCTION, overlap_rows=ALWAYS),
    candidates.choose: StageTuning(overlap_rows=ALWAYS, shared_by_row_classes=True),
    candidates.select: StageTuning(opaque=True),
    race.draw_from_candidates: StageTuning(warps_of_few_rows=1, overlap_rows=ALWAYS, shared_by_row_classes=True),
    race.draw_from_unordered_candidates: StageTuning(
        tile=Tile(128, 2), overlap_rows=ALWAYS, fuses_everything=True, same_by_row_classes=True
    ),
    race.draw_and_keep: StageTuning(tile=Tile(128, 2), fuses_everything=True),
    bounds.race_bounds: StageTuning(tile=Tile(1024, 1), streams=True, same_by_row_classes=True),
    bounds.race_masked_bounds: StageTuning(tile=Tile(128, 1), streams=True, same_by_row_classes=True),
    bounds.race_leaders: StageTuning(
        tile=Tile(2048, 8, 1), tile_by_block={256: Tile(1024, 4, 1)}, overlap_rows=ALWAYS, same_by_row_classes=True
    ),
    bounds.draw_from_leaders: StageTuning(tile=_TWO_ROWS, overlap_rows=ALWAYS, same_by_row_classes=True),
    race.race_maxima: StageTuning(
        tile=Tile(512, 4),
        tile_by_block={256: Tile(256, 1)},
        tile_of_one_row=Tile(256, 1),
        overlap_rows=ALWAYS,
        overlap_rows_by_block={512: SMALL_ROWS},
        streams=True,
    ),
    race.draw_from_blocks: StageTuning(tile=Tile(128, 8), overlap_rows=ALWAYS),
    race.first_from_blocks: StageTuning(
        tile=_TWO_ROWS,
        tile_by_block={candidates.STORED_BLOCK: Tile(2048, 8, 1)},  # 16 times as many blocks
        overlap_rows=ALWAYS,
        ahead_rows=ALWAYS,
        shared_by_row_classes=True,
    ),
    # no kernel beside a collective takes part in programmatic dependent launch
    shards.first_of_shard: StageTuning(tile=_TWO_ROWS, shared_by_row_classes=True),
    shards.winners_of_blocks: StageTuning(tile=Tile(128, 8)),
    shards.winners_of_leaders: StageTuning(tile=_TWO_ROWS, same_by_row_classes=True),
    shards.draw_from_told: StageTuning(tile=Tile(128, 2), fuses_everything=True, same_by_row_classes=True),
    law.candidate_law: StageTuning(warps_of_few_rows=1, shared_by_row_classes=True),
    law.unfiltered_weights: StageTuning(tile=Tile(1024, 1), warps_of_few_rows=1, overlap_rows=ALWAYS, streams=True),
    law.weight_blocks: StageTuning(tile=Tile(2048, 2), overlap_rows=SMALL_ROWS),
    law.probability_blocks: StageTuning(tile=Tile(2048, 2), overlap_rows=ALWAYS, streams=True),
    law.sum_law: StageTuning(tile=_TWO_ROWS),
    logprobs.law_scale: StageTuning(overlap_rows=ALWAYS, launches_next_promptly=True, shared_by_row_classes=True),
    logprobs.law_in_blocks: StageTuning(tile=Tile(1024, 1), streams=True, overlap_rows=ALWAYS),
    logprobs.sum_block_laws: StageTuning(tile=_TWO_ROWS, overlap_rows=ALWAYS),
    kept.cut_of_drawn: StageTuning(overlap_rows=ALWAYS, shared_by_row_classes=True),
    kept.kept_in_blocks: StageTuning(tile=Tile(1024, 1), streams=True, overlap_rows=ALWAYS),
    kept.sum_kept: StageTuning(tile=_TWO_ROWS),
    logprobs.tokens_before: StageTuning(
        tile=Tile(512, 4), tile_by_block={1024: Tile(256, 2)}, streams=True, overlap_rows=ALWAYS
    ),
    logprobs.top_logprobs: StageTuning(shared_by_row_classes=True),
    logprobs.logprobs_from_kept: StageTuning(shared_by_row_classes=True, overlap_rows=ALWAYS),
    row_filters.with_digit: StageTuning(tile=Tile(2048, 8, 1)),
    threshold.block_masses: StageTuning(tile_of_one_row=Tile(512, 2), overlap_rows=SMALL_ROWS),
    threshold.flag_exceeding_rows: StageTuning(tile=Tile(4096, 8), overlap_rows=ALWAYS, shared_by_row_classes=True),
    threshold.row_masses: StageTuning(tile=_TWO_ROWS, overlap_rows=ALWAYS),
    threshold.threshold_from_candidates: StageTuning(tile=_TWO_ROWS, shared_by_row_classes=True),
    threshold.threshold_without_candidates: StageTuning(
        tile=_TWO_ROWS, overlap_rows=ALWAYS, shared_by_row_classes=True
    ),
    threshold.search_threshold: StageTuning(opaque=True, num_kernels=3),
    threshold.search_in_order: StageTuning(opaque=True),
    row_race.race_rows: StageTuning(opaque=True),
    row_race.race_and_weigh: StageTuning(opaque=True),
    row_race.race_beyond_candidates: StageTuning(opaque=True, num_kernels=4),
    row_race.race_top_k: StageTuning(opaque=True, num_kernels=4),
    row_race.draw_from_winners: StageTuning(overlap_rows=ALWAYS),
    row_race.draw_from_candidates_and_winners: StageTuning(
        tile=_TWO_ROWS, overlap_rows=ALWAYS, same_by_row_classes=True
    ),
    acceptance.judge_drafts: StageTuning(tile=Tile(128, 1), warps_of_few_rows=1, overlap_rows=ALWAYS),
    emission.final_rows: StageTuning(overlap_rows=ALWAYS),
    emission.emit_matches: StageTuning(
        tile=Tile(128, 1), warps_of_few_rows=1, overlap_rows=SMALL_ROWS, keeps_reductions=True
    ),
    residual.emit_from_final_candidates: StageTuning(tile=_TWO_ROWS, warps_of_few_rows=1),
    residual.final_winners: StageTuning(tile=Tile(512, 1), warps_of_few_rows=1, overlap_rows=ALWAYS, streams=True),
    residual.draw_from_final_blocks: StageTuning(tile=_TWO_ROWS),
    residual.emit_from_final_blocks: StageTuning(tile=Tile(128, 1), warps_of_few_rows=2, overlap_rows=ALWAYS),
}
"""By stage. A race in blocks of 256 tokens is over short rows, and overlaps however many they are."""

_LEFT_TO_INDUCTOR = StageTuning()


def tuning_of(stage: Stage) -> StageTuning:
    """The declaration of a stage, or defaults that leave everything to Inductor."""
    return TUNING.get(stage, _LEFT_TO_INDUCTOR)


def is_hand_written(stage: Stage) -> bool:
    """Whether a stage has kernels of its own on a GPU, which torch stands in for until they are compiled."""
    return stage in row_race.IN_TORCH
