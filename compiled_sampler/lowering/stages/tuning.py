"""The tuning of every stage, one declaration each: the one place that says how Inductor shapes its kernels.

A stage without an entry is left to Inductor. What the fields mean stands in ``stage_tuning.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from compiled_sampler.core.rows import gather_rows
from compiled_sampler.edits.dry import without_repetitions
from compiled_sampler.edits.lists import without_bad_words, without_stops
from compiled_sampler.edits.stops import cut_at_stop, with_finished
from compiled_sampler.edits.written import (
    record_drafts,
    record_draws,
    record_ends,
    take_back,
    write_biases,
    write_penalties,
)
from compiled_sampler.exact.row_race import (
    draw_from_candidates_and_winners,
    draw_from_winners,
    race_and_weigh,
    race_beyond_candidates,
    race_rows,
    race_top_k,
)
from compiled_sampler.exact.threshold import (
    block_masses,
    bound_row_mass,
    row_masses,
    search_threshold,
    search_threshold_on_cpu,
    threshold_from_candidates,
    threshold_without_candidates,
)
from compiled_sampler.lowering.stages.stage_tuning import ALWAYS, Stage, StageTuning, Tile
from compiled_sampler.passes.copies import customized_with_maxima, masked_with_maxima
from compiled_sampler.passes.draws.bounds import draw_from_leaders, race_bounds, race_leaders, race_masked_bounds
from compiled_sampler.passes.draws.candidates import draw_and_keep, draw_from_candidates, draw_from_unordered_candidates
from compiled_sampler.passes.draws.race import draw_from_blocks, first_from_blocks, race_maxima
from compiled_sampler.passes.laws.block_laws import law_in_blocks, law_scale, sum_block_laws
from compiled_sampler.passes.laws.cut import cut_of_drawn
from compiled_sampler.passes.laws.kept import kept_in_blocks, sum_kept
from compiled_sampler.passes.laws.law import (
    candidate_law,
    probability_blocks,
    sum_law,
    unfiltered_weights,
    weight_blocks,
)
from compiled_sampler.passes.laws.logprobs import logprobs_from_kept, tokens_before, top_logprobs
from compiled_sampler.passes.maxima import coarser_keys, mass_units, order_maxima, order_maxima_of, rows_of_blocks
from compiled_sampler.passes.narrowing import (
    STORED_BLOCK,
    all_blocks,
    all_coarser,
    child_blocks,
    child_tokens,
    choose_blocks,
    choose_child_blocks,
    choose_child_tokens,
)
from compiled_sampler.passes.ranking import choose, place, rank, select, sort
from compiled_sampler.passes.row_filters.typical import with_digit
from compiled_sampler.pipeline.scheduling.schedule import SMALL_ROWS
from compiled_sampler.speculation.acceptance import judge_drafts
from compiled_sampler.speculation.emission import emit_matches
from compiled_sampler.speculation.final_row import final_rows
from compiled_sampler.speculation.residual import (
    draw_from_final_blocks,
    emit_from_final_blocks,
    emit_from_final_candidates,
    final_winners,
)

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
    # passes/copies.py
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
    rows_of_blocks: StageTuning(tile=_TWO_ROWS, overlap_rows=ALWAYS, launches_next_promptly=True),
    mass_units: StageTuning(tile=_TWO_ROWS),
    # passes/narrowing.py
    all_coarser: StageTuning(tile=Tile(1024, 4), overlap_rows=ALWAYS, shared_by_row_classes=True),
    all_blocks: StageTuning(overlap_rows=ALWAYS),
    child_blocks: StageTuning(overlap_rows=ALWAYS, shared_by_row_classes=True),
    child_tokens: StageTuning(tile=Tile(1024, 4), overlap_rows=ALWAYS, shared_by_row_classes=True),
    # passes/narrowing.py, a level in one kernel
    choose_blocks: StageTuning(tile=_ONE_ROW, overlap_rows=ALWAYS, shared_by_row_classes=True, fuses_everything=True),
    choose_child_blocks: StageTuning(
        tile=_ONE_ROW, overlap_rows=ALWAYS, shared_by_row_classes=True, fuses_everything=True
    ),
    choose_child_tokens: StageTuning(
        tile=_ONE_ROW, overlap_rows=ALWAYS, shared_by_row_classes=True, fuses_everything=True
    ),
    # passes/ranking.py
    sort: StageTuning(tile=Tile(128, 2), overlap_rows=ALWAYS, same_by_row_classes=True),
    rank: StageTuning(tile=Tile(4096, 4), overlap_rows=ALWAYS),
    place: StageTuning(overlap_rows=ALWAYS),
    choose: StageTuning(overlap_rows=ALWAYS, shared_by_row_classes=True),
    select: StageTuning(opaque=True),
    # passes/draws/candidates.py
    draw_from_candidates: StageTuning(warps_of_few_rows=1, overlap_rows=ALWAYS, shared_by_row_classes=True),
    draw_from_unordered_candidates: StageTuning(
        tile=Tile(128, 2), overlap_rows=ALWAYS, fuses_everything=True, same_by_row_classes=True
    ),
    draw_and_keep: StageTuning(tile=Tile(128, 2), fuses_everything=True),
    # passes/draws/bounds.py
    race_bounds: StageTuning(tile=Tile(1024, 1), streams=True, same_by_row_classes=True),
    race_masked_bounds: StageTuning(tile=Tile(128, 1), streams=True, same_by_row_classes=True),
    race_leaders: StageTuning(
        tile=Tile(2048, 8, 1), tile_by_block={256: Tile(1024, 4, 1)}, overlap_rows=ALWAYS, same_by_row_classes=True
    ),
    draw_from_leaders: StageTuning(tile=_TWO_ROWS, overlap_rows=ALWAYS, same_by_row_classes=True),
    # passes/draws/race.py
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
        shared_by_row_classes=True,
    ),
    # passes/laws/law.py
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
    # passes/row_filters/typical.py
    with_digit: StageTuning(tile=Tile(2048, 8, 1)),
    # exact/threshold.py
    block_masses: StageTuning(tile_of_one_row=Tile(512, 2), overlap_rows=SMALL_ROWS),
    bound_row_mass: StageTuning(tile=Tile(4096, 8), overlap_rows=ALWAYS, shared_by_row_classes=True),
    row_masses: StageTuning(tile=_TWO_ROWS, overlap_rows=ALWAYS),
    threshold_from_candidates: StageTuning(tile=_TWO_ROWS, shared_by_row_classes=True),
    threshold_without_candidates: StageTuning(tile=_TWO_ROWS, overlap_rows=ALWAYS, shared_by_row_classes=True),
    search_threshold: StageTuning(opaque=True, num_kernels=3),
    search_threshold_on_cpu: StageTuning(opaque=True),
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
