"""Stages in eager torch, which writes to memory what kernels keep in registers: in chunks of rows, with the same bits.

The stages named here hold far more than they read and return; of all others an operation holds a few numbers a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.core.stage import Run, fuses
from compiled_sampler.edits.changes import EditedTokens, take_back
from compiled_sampler.edits.custom import customized
from compiled_sampler.edits.dry import without_repetitions
from compiled_sampler.edits.history import History, RowHistory, row_history
from compiled_sampler.edits.masks import masked
from compiled_sampler.edits.penalties import write_penalties
from compiled_sampler.edits.recording import record_drafts, record_draws, record_ends
from compiled_sampler.exact.row_race import (
    IN_TORCH,
    NO_WINNER,
    mass_before_winner,
    race_and_weigh,
    race_and_weigh_in_torch,
    race_beyond_candidates_in_torch,
    race_rows,
    race_rows_in_torch,
    race_top_k_in_torch,
)
from compiled_sampler.exact.threshold import block_masses, order_keys, search_threshold_in_torch
from compiled_sampler.exact.triton import num_parts
from compiled_sampler.passes.bounds import LEADERS, race_bounds, race_leaders, race_masked_bounds
from compiled_sampler.passes.candidates import all_blocks, child_tokens
from compiled_sampler.passes.cliff import above_cliff, drop_keys
from compiled_sampler.passes.deviation import distance_sums, logit_ends, within_distance
from compiled_sampler.passes.kept import kept_in_blocks
from compiled_sampler.passes.law import (
    law_in_blocks,
    probabilities,
    probability_blocks,
    race_order,
    unfiltered_weights,
    weight_blocks,
)
from compiled_sampler.passes.logprobs import tokens_before
from compiled_sampler.passes.mass_filters import last_top_choices, mass_sums, without_first, without_light
from compiled_sampler.passes.maxima import customized_with_maxima, masked_with_maxima, order_maxima, order_maxima_of
from compiled_sampler.passes.race import draw_from_blocks, first_from_blocks, race_maxima
from compiled_sampler.passes.shards import (
    count_of_key,
    law_keys_of_shard,
    law_sums_of_shard,
    weights_from_keys,
    winners_of_blocks,
)
from compiled_sampler.passes.typical import digit_masses, within_typical
from compiled_sampler.pipeline.chunks import in_chunks_of, leaves_by_row
from compiled_sampler.pipeline.schedule import eager_rows
from compiled_sampler.speculation.residual import final_winners, residual_of_blocks, residual_of_walked_blocks

Stage = Callable[..., Any]

_OF_TOKENS: dict[Stage, int] = {
    **dict.fromkeys((all_blocks, customized, customized_with_maxima, masked, masked_with_maxima), 0),
    **dict.fromkeys((order_maxima, race_bounds, race_masked_bounds, race_maxima, race_order), 0),
    **dict.fromkeys((block_masses, mass_before_winner, order_keys, count_of_key, weights_from_keys), 0),
    **dict.fromkeys((race_and_weigh_in_torch, race_beyond_candidates_in_torch, race_rows_in_torch), 0),
    **dict.fromkeys((race_top_k_in_torch, search_threshold_in_torch), 0),
    **dict.fromkeys((kept_in_blocks, law_in_blocks, law_keys_of_shard, law_sums_of_shard, tokens_before), 0),
    **dict.fromkeys((probabilities, probability_blocks, weight_blocks), 0),
    **dict.fromkeys((above_cliff, drop_keys, distance_sums, logit_ends, within_distance), 0),
    **dict.fromkeys((last_top_choices, mass_sums, without_first, without_light, digit_masses, within_typical), 0),
    order_maxima_of: 1,
    residual_of_blocks: 2,
    final_winners: 2,
    residual_of_walked_blocks: 4,
}
"""Stages that hold numbers for each token of a row, and how many of their first tensors they read at any row."""

_OF_BLOCKS: dict[Stage, int] = {
    **dict.fromkeys((draw_from_blocks, first_from_blocks, winners_of_blocks), 1),
    race_leaders: LEADERS,
}
"""Stages that hold numbers for each token of so many blocks of a row."""

_OF_POSITIONS: dict[Stage, int] = {
    row_history: 20,
    write_penalties: 51,  # tokens and what is added, gathered and as indices
    take_back: 51,
    without_repetitions: 270,  # an int32 and a bool for each length of a repetition
    record_draws: 10,
    record_drafts: 5,
    record_ends: 5,
}
"""Bytes, measured, that a stage holds for each position of a row's history, and again for each draft of the row."""


def eagerly(stage: Stage, /, *tensors: Any, **static: Any) -> Any:
    """The results of a stage, a ``run`` for the pipeline: for no more rows at once than its scratch has room for."""
    most = _most_rows(stage, tensors, static)
    if most is None:
        return stage(*tensors, **static)
    whole = _OF_TOKENS.get(stage, 0)
    if stage is unfiltered_weights:
        whole = int(tensors[1] is not None)  # row_ids
    return in_chunks_of(most, lambda *rows: stage(*tensors[:whole], *rows, **static), *tensors[whole:])


def without_kernels(stage: Stage, /, *tensors: Any, **static: Any) -> Any:
    """``eagerly``, with torch in the place of hand-written kernels."""
    results = eagerly(IN_TORCH.get(stage, stage), *tensors, **static)
    # Stages that read winners and masses are compiled for as many parts of a row as kernels make.
    if stage is race_rows:
        return _in_parts(results, NO_WINNER, static["vocab_size"], weighs=False)
    if stage is race_and_weigh:
        pairs = zip(results, (0, NO_WINNER), strict=True)
        return tuple(_in_parts(each, value, static["vocab_size"], weighs=True) for each, value in pairs)
    return results


def _in_parts(of_rows: Tensor, value: int, vocab_size: int, *, weighs: bool) -> Tensor:
    """Numbers ``[R, parts]``: the first part of a row has its number ``[R, 1]``, the others a value."""
    parts = num_parts(vocab_size, of_rows.shape[0], weighs=weighs)
    return F.pad(of_rows, (0, parts - 1), value=value)


def in_chunks_as(stage: Stage, run: Run, step: Callable[..., Any], *tensors: Any) -> Any:
    """``step(*tensors)``, which runs the stage and reads its results: in eager torch for as many rows at once."""
    most = None if fuses(run) else _most_rows(stage, tensors, {})
    return step(*tensors) if most is None else in_chunks_of(most, step, *tensors)


def _most_rows(stage: Stage, tensors: tuple[Any, ...], static: dict[str, Any]) -> int | None:
    """Rows that a stage has room for at once; None where it takes all."""
    if stage in _OF_TOKENS or stage is unfiltered_weights:
        return eager_rows(tokens=static["vocab_size"])
    if stage in _OF_BLOCKS:
        return eager_rows(tokens=_OF_BLOCKS[stage] * static["block"])
    if stage is child_tokens:
        return eager_rows(tokens=tensors[1].shape[1] * static["ratio"] * static["size"])
    if stage not in _OF_POSITIONS:
        return None
    length = sum(map(_positions, tensors))
    drafts = (leaf for leaf in leaves_by_row(tensors) if leaf.dtype is torch.int64 and leaf.dim() == 2)
    num_drafts = max((leaf.shape[1] for leaf in drafts), default=0)
    return eager_rows(row_bytes=_OF_POSITIONS[stage] * length * (1 + num_drafts))


def _positions(read: Any) -> int:
    """The positions of a history, or of what was edited for each; 0 of anything else."""
    if isinstance(read, EditedTokens):
        return read.token_ids.shape[1]
    return read.entries.shape[2] if isinstance(read, History | RowHistory) else 0
