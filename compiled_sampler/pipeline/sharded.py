"""A draw from rows whose columns are split over ranks, as stages before and after one or two collectives.

A rank edits and reads its own columns alone. What it tells the others has the size of a few tokens a row:

- ``greedy``, ``no_filter``: its best packed (score key, token id), of which an all-reduce takes the largest.
- ``min_p``: before that its largest logit, an all-reduce as well.
- ``top_k_top_p[C]``: its first C packed (order key, token id), by an all-gather; every rank then draws among the first
  C of these. If top-p is a share of the whole row's mass, the masses of the shards are summed by an all-reduce.

All else takes whole rows: searches, logprobs, edits of the user and filters of whole rows. Of a few rows every rank
gets all columns and draws for itself; of more, each rank gets all columns of its part of the rows, and tells what it
drew for these. Every rank makes the same collectives, whatever its width: no choice here depends on a value.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from compiled_sampler.batch import SampleOutputs
from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import Run
from compiled_sampler.edits.tables import EditInputs, EditTables, NoiseInputs
from compiled_sampler.exact.threshold import block_masses, row_masses
from compiled_sampler.logprobs import LogprobInputs
from compiled_sampler.modes import Mode
from compiled_sampler.passes.blocks import AnyLogits
from compiled_sampler.passes.maxima import mass_units
from compiled_sampler.passes.race import draw_from_candidates
from compiled_sampler.passes.shards import (
    candidates_of_shard,
    candidates_of_shards,
    draw_from_shards,
    first_of_shard,
    largest_of_shard,
    rows_of_shard,
    winners_of_blocks,
    winners_of_leaders,
    words_of_shard,
)
from compiled_sampler.pipeline.chunks import in_chunks, part_of
from compiled_sampler.pipeline.edits import drawing_schedule, edited_logits, has_lists, logits_to_draw_from
from compiled_sampler.pipeline.sample import Draw, edit_and_draw, keyed_by, race_blocks, race_by_bounds
from compiled_sampler.pipeline.schedule import Schedule, schedule_for
from compiled_sampler.pipeline.search import block_maxima, find_candidates
from compiled_sampler.shard import VocabularyShard

_FEWEST_EXCHANGED = 8
"""From so many rows on, ranks draw for different rows: a collective of 9 us more on an H200, but fewer bytes."""


def drawing_in(shard: VocabularyShard) -> Draw:
    """``edit_and_draw`` for logits that are the columns of a shard ``[R, >= width]``."""

    def draw(
        schedule: Schedule,
        logits: Tensor,
        row_slots: RowSlots,
        edits: EditInputs | None,
        logprobs: LogprobInputs | None,
        noise: NoiseInputs | None,
        stream: int,
        run: Run,
    ) -> SampleOutputs:
        mode = schedule.mode
        noise_slots = keyed_by(row_slots, noise, run)
        if mode.searches or logprobs is not None or not _are_by_token(edits):
            return _draw_for_rows(mode, logits, row_slots, noise_slots, edits, logprobs, stream, shard, run)
        width = shard.width(mode.vocab_size)
        own = replace(mode, vocab_size=max(width, 1), base_is_row=False)
        if not width:  # stands for a token that is masked
            logits, edits = logits.new_full((logits.shape[0], 1), -math.inf), None
        elif edits is not None and has_lists(edits.tables):
            logits, edits = _edited_columns(schedule, logits, row_slots, edits, shard, run), None
        elif edits is not None:
            edits = _masks_of_shard(mode, row_slots, edits, shard, run)
        schedule = drawing_schedule(own, logits, edits)
        columns = logits_to_draw_from(schedule, logits, row_slots, edits, run, ExitStack()).logits
        if mode.capacity:
            return _draw_from_candidates(mode, schedule, columns, noise_slots, stream, shard, run)
        return _draw_from_winners(schedule, columns, noise_slots, stream, shard, run)

    return draw


def _are_by_token(edits: EditInputs | None) -> bool:
    """Whether edits change each token by itself; that those of the user do is not relied on."""
    return edits is None or (edits.custom is None and edits.tables.filters is None)


def _draw_for_rows(
    mode: Mode,
    logits: Tensor,
    row_slots: RowSlots,
    noise_slots: RowSlots,
    edits: EditInputs | None,
    logprobs: LogprobInputs | None,
    stream: int,
    shard: VocabularyShard,
    run: Run,
) -> SampleOutputs:
    """Tokens of whole rows, ``[R]``: all of them on every rank, or each rank draws for some and tells the others."""
    num_rows, given_ids = logits.shape[0], None if logprobs is None else logprobs.given_ids
    exchanges = num_rows >= _FEWEST_EXCHANGED and shard.count > 1
    if exchanges:
        rows = shard.exchanged_rows(logits, mode.vocab_size)
        first, end = shard.own_part(num_rows)
        by_row = row_slots, noise_slots, edits, given_ids
        row_slots, noise_slots, edits, given_ids = part_of(by_row, first, end)
    else:
        rows = shard.whole_rows(logits, mode.vocab_size)
    logprobs = None if logprobs is None else logprobs._replace(given_ids=given_ids)
    schedule = drawing_schedule(mode, rows, edits, logprobs)
    drawn = edit_and_draw(schedule, rows, row_slots, edits, logprobs, None, stream, run, noise_slots)
    return shard.told_rows(drawn, num_rows) if exchanges else drawn


def _edited_columns(
    schedule: Schedule, logits: Tensor, row_slots: RowSlots, edits: EditInputs, shard: VocabularyShard, run: Run
) -> Tensor:
    """The shard's columns after all edits, float32 ``[R, width]``; the edits see a row that is -inf elsewhere."""
    # So ids and masks mean what they mean for whole rows. An edit changes a token by itself, and lifts no -inf.
    vocab_size = schedule.mode.vocab_size
    in_place = edits._replace(leave=True)

    def edited_chunk(logits: Tensor, row_slots: RowSlots, edits: EditInputs) -> Tensor:
        rows = logits.new_full((logits.shape[0], vocab_size), -math.inf, dtype=torch.float32)
        own = shard.own(rows, vocab_size)
        own.copy_(logits.detach()[:, : own.shape[1]])
        return shard.own(edited_logits(schedule, rows, row_slots, edits, run), vocab_size).contiguous()

    edited = schedule_for(schedule.mode, logits.shape[0], logits.device, is_edited=True)
    return in_chunks(edited, run, edited_chunk, logits, row_slots, in_place)


def _masks_of_shard(
    mode: Mode, row_slots: RowSlots, edits: EditInputs, shard: VocabularyShard, run: Run
) -> EditInputs | None:
    """The masks of the shard's columns, for edits without lists; None where no mask acts."""
    masks = edits.token_bitmask, row_slots.slots, edits.tables.allowed
    if masks[0] is None and masks[2] is None:
        return None
    static = {"vocab_size": mode.vocab_size, "start": shard.start, "width": shard.width(mode.vocab_size)}
    return EditInputs(EditTables(), run(words_of_shard, *masks, **static))


def _draw_from_winners(
    schedule: Schedule, logits: AnyLogits, row_slots: RowSlots, stream: int, shard: VocabularyShard, run: Run
) -> SampleOutputs:
    """The winners of races over the columns of all ranks, ``[R]``."""
    mode, start = schedule.mode, {"start": shard.start}

    def winners_of_chunk(logits: AnyLogits, row_slots: RowSlots, largest: Tensor | None) -> Tensor:
        if not mode.draws:
            blocks = block_maxima(schedule, logits, run)
            return run(first_of_shard, logits, blocks, **schedule.order.blocks, **start)
        rows, row_max = run(rows_of_shard, row_slots, stream=stream, **start), None
        if largest is not None:
            row_max, _ = run(mass_units, largest, row_slots)
        elif schedule.races_by_bounds:
            return run(winners_of_leaders, *race_by_bounds(schedule, logits, rows, run, finds_max=False), **start)
        blocks = race_blocks(schedule, logits, rows, row_max, None, run)
        return run(winners_of_blocks, logits, blocks, rows, row_max, **schedule.race.blocks_by_bits, **start)

    largest = _largest(schedule, logits, shard, run) if mode.filters_min_p else None
    winners = in_chunks(schedule, run, winners_of_chunk, logits, row_slots, largest)
    return run(draw_from_shards, shard.maximum(winners), row_slots)


def _largest(schedule: Schedule, logits: AnyLogits, shard: VocabularyShard, run: Run) -> Tensor:
    """The largest order key of each row over the columns of all ranks, int32 ``[R, 1]``."""

    def largest_of_chunk(logits: AnyLogits) -> Tensor:
        return run(largest_of_shard, block_maxima(schedule, logits, run).keys)

    return shard.maximum(in_chunks(schedule, run, largest_of_chunk, logits))


def _draw_from_candidates(
    mode: Mode,
    schedule: Schedule,
    logits: AnyLogits,
    row_slots: RowSlots,
    stream: int,
    shard: VocabularyShard,
    run: Run,
) -> SampleOutputs:
    """The winners of races among the candidates of whole rows, ``[R]``."""

    def candidates_of_chunk(logits: AnyLogits, row_slots: RowSlots) -> Tensor:
        found = find_candidates(schedule, logits, row_slots, run, in_order=False)
        static = {"start": shard.start, "count": mode.capacity}
        return run(candidates_of_shard, found.tokens, found.nan_bits, **static)

    def masses_of_chunk(logits: AnyLogits, row_slots: RowSlots, largest: Tensor) -> Tensor:
        row_max, scale = run(mass_units, largest, row_slots)
        return run(row_masses, run(block_masses, logits, row_max, scale, **schedule.mass.blocks))

    told = shard.collected(in_chunks(schedule, run, candidates_of_chunk, logits, row_slots)).unbind()
    ordered, nan_bits, largest = run(candidates_of_shards, told, count=min(mode.capacity, mode.vocab_size))
    row_mass = None
    if mode.base_is_row:
        row_mass = shard.total(in_chunks(schedule, run, masses_of_chunk, logits, row_slots, largest))
    return run(draw_from_candidates, ordered, nan_bits, row_slots, row_mass, stream=stream)
