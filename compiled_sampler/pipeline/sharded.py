"""A draw from rows whose columns are split over ranks, as stages before and after one or two collectives.

A rank edits and reads its own columns alone. What it tells the others has the size of a few tokens a row:

- ``greedy``, ``no_filter``: its best packed (score key, token id), of which an all-reduce takes the largest.
- ``min_p``: before that its largest logit, an all-reduce as well.
- ``top_k_top_p[C]``: its first C packed (order key, token id), by an all-gather; every rank then draws among the first
  C of these. If top-p is a share of the whole row's mass, the masses of the shards are summed by an all-reduce.

- ``top_k``, ``full`` with ``slow_wire``: the numbers or masses of its tokens from 15 order keys on, which all-reduces
  sum, 8 rounds for top-k and 8 for top-p; how many tokens have the last key that is kept; then its best as above.

Logprobs of the laws "raw" and "processed": the largest logit of each block of the law by an all-reduce, with the logits
of the tokens; masses relative to these, and ranks, by another; the first n tokens by an all-gather.

All else takes whole rows: other searches, logprobs of few rows or of what filters keep, edits of the user and filters
of whole rows. Of a few rows every rank gets all columns and draws for itself; of more, each rank gets all columns of
its part of the rows, and tells what it drew for these. Every rank makes the same collectives, whatever its width: no
choice here depends on a value.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.batch import SampleInputs, SampleOutputs
from compiled_sampler.core.order import Last
from compiled_sampler.core.rows import RowSlots, row_slots_of
from compiled_sampler.edits.tables import EditInputs, EditTables
from compiled_sampler.exact.row_race import mass_before_winner
from compiled_sampler.exact.threshold import block_masses, row_masses
from compiled_sampler.logprobs import LogprobInputs, LogprobOutputs
from compiled_sampler.modes import CAPACITIES, Mode
from compiled_sampler.passes import shards
from compiled_sampler.passes.blocks import AnyLogits
from compiled_sampler.passes.logprobs import LAW_BLOCK, law_scale, top_logprobs
from compiled_sampler.passes.maxima import mass_units
from compiled_sampler.passes.race import draw_from_candidates
from compiled_sampler.passes.shards import KEY_ROUNDS, KeyRange
from compiled_sampler.pipeline.chunks import in_chunks, part_of
from compiled_sampler.pipeline.edits import drawing_schedule, edited_logits, has_lists, logits_to_draw_from
from compiled_sampler.pipeline.logprobs import first_tokens
from compiled_sampler.pipeline.sample import Draw, edit_and_draw, keyed_by, race_blocks, race_by_bounds
from compiled_sampler.pipeline.schedule import StepRun, schedule_for
from compiled_sampler.pipeline.search import block_maxima, find_candidates
from compiled_sampler.shard import VocabularyShard

_GATHERED_BYTES = 2**21
"""Up to so many bytes of logits, all columns on every rank take one collective of up to 20 us on H200s, not two of 9 to
13 us and their kernels."""
_EXCHANGED_BYTES = 2**24
"""Up to so many bytes of logits, an all-to-all and an all-gather take no longer than the collectives of a draw with
logprobs; measured on two H200s, docs/sharded.md."""
_FEWEST_EXCHANGED = 8
"""From so many rows on, ranks draw for different rows: a collective of 9 us more on an H200, but fewer bytes."""


def drawing_in(shard: VocabularyShard) -> Draw:
    """``edit_and_draw`` for logits that are the columns of a shard ``[R, >= width]``."""

    def draw(run: StepRun, inputs: SampleInputs) -> SampleOutputs:
        mode, logits, edits, logprobs = run.mode, inputs.logits, inputs.edits, inputs.logprobs
        row_slots = row_slots_of(inputs)
        noise_slots = keyed_by(row_slots, inputs.noise, run)
        if _takes_rows(mode, logits, logprobs, shard) or not _are_by_token(edits):
            return _draw_for_rows(run, inputs, noise_slots, shard)
        width, start = shard.width(mode.vocab_size), shard.start
        own = replace(mode, vocab_size=max(width, 1), base_is_row=False)
        if mode.searches:  # passes over the columns, without candidates
            own = replace(own, capacity=0, beyond_candidates=False)
        if not width:  # stands for a token that is masked
            logits, edits, start = logits.new_full((logits.shape[0], 1), -math.inf), None, 0
        raw = logits
        if edits is not None and has_lists(edits.tables):
            logits, edits = _edited_columns(run, logits, row_slots, edits, shard), None
        elif edits is not None:
            edits = _masks_of_shard(run, row_slots, edits, shard)
        run = StepRun(run, drawing_schedule(own, logits, edits))
        columns = logits_to_draw_from(run, logits, row_slots, edits, ExitStack()).logits
        draw_from = _draw_from_candidates if own.capacity else _draw_from_winners
        drawn = draw_from(mode, run, columns, noise_slots, shard)
        if logprobs is None:
            return drawn
        rows = raw if logprobs.wanted.of == "raw" else columns, row_slots, drawn.token_ids
        return drawn._replace(logprobs=_logprobs(mode, run, *rows, logprobs, start, shard))

    return draw


def _takes_rows(mode: Mode, logits: Tensor, logprobs: LogprobInputs | None, shard: VocabularyShard) -> bool:
    """Whether draws of a mode move logits, which is the same on every rank."""
    num_rows, wanted = logits.shape[0], None if logprobs is None else logprobs.wanted
    num_bytes = num_rows * mode.vocab_size * logits.element_size()
    if wanted is not None and (wanted.reads_filters or wanted.top > CAPACITIES[0]):
        return True
    if shard.slow_wire:
        return False
    if wanted is not None and num_bytes <= _EXCHANGED_BYTES:
        return True
    is_small = num_bytes <= _GATHERED_BYTES and num_rows < _FEWEST_EXCHANGED
    takes_two = mode.base_is_row if mode.capacity else mode.filters_min_p  # collectives, if not logits
    return mode.searches or (is_small and takes_two)


def _are_by_token(edits: EditInputs | None) -> bool:
    """Whether edits change each token by itself; that those of the user do is not relied on."""
    return edits is None or (edits.custom is None and edits.tables.filters is None)


def _draw_for_rows(run: StepRun, inputs: SampleInputs, noise_slots: RowSlots, shard: VocabularyShard) -> SampleOutputs:
    """Tokens of whole rows, ``[R]``: all of them on every rank, or each rank draws for some and tells the others."""
    mode, num_rows, logprobs = run.mode, inputs.logits.shape[0], inputs.logprobs
    exchanges = num_rows >= _FEWEST_EXCHANGED and shard.count > 1
    if exchanges:
        rows = shard.exchanged_rows(inputs.logits, mode.vocab_size, run)
        given_ids = None if logprobs is None else logprobs.given_ids
        by_row = row_slots_of(inputs), noise_slots, inputs.edits, given_ids
        row_slots, noise_slots, edits, given_ids = part_of(by_row, *shard.own_part(num_rows))
        logprobs = None if logprobs is None else logprobs._replace(given_ids=given_ids)
        inputs = inputs._replace(**row_slots._asdict(), edits=edits, logprobs=logprobs)
    else:
        rows = shard.whole_rows(inputs.logits, mode.vocab_size, run)
    run = StepRun(run, drawing_schedule(mode, rows, inputs.edits, logprobs))
    drawn = edit_and_draw(run, inputs._replace(logits=rows), noise_slots)
    return shard.told_rows(drawn, num_rows, run) if exchanges else drawn


def _edited_columns(
    run: StepRun, logits: Tensor, row_slots: RowSlots, edits: EditInputs, shard: VocabularyShard
) -> Tensor:
    """The shard's columns after all edits, float32 ``[R, width]``; the edits see a row that is -inf elsewhere."""
    # So ids and masks mean what they mean for whole rows. An edit changes a token by itself, and lifts no -inf.
    vocab_size = run.mode.vocab_size
    in_place = edits._replace(leave=True)

    def edited_chunk(logits: Tensor, row_slots: RowSlots, edits: EditInputs) -> Tensor:
        rows = logits.new_full((logits.shape[0], vocab_size), -math.inf, dtype=torch.float32)
        own = shard.own(rows, vocab_size)
        own.copy_(logits[:, : own.shape[1]])
        return shard.own(edited_logits(run, rows, row_slots, edits), vocab_size).contiguous()

    edited = StepRun(run, schedule_for(run.mode, logits.shape[0], logits.device, is_edited=True))
    return in_chunks(edited, edited_chunk, logits, row_slots, in_place)


def _masks_of_shard(run: StepRun, row_slots: RowSlots, edits: EditInputs, shard: VocabularyShard) -> EditInputs | None:
    """The masks of the shard's columns, for edits without lists; None where no mask acts."""
    masks = edits.token_bitmask, row_slots.slots, edits.tables.allowed
    if masks[0] is None and masks[2] is None:
        return None
    static = {**run.vocab, "start": shard.start, "width": shard.width(run.mode.vocab_size)}
    return EditInputs(EditTables(), run(shards.words_of_shard, *masks, **static))


def _logprobs(
    mode: Mode,
    run: StepRun,
    logits: AnyLogits,
    row_slots: RowSlots,
    token_ids: Tensor,
    asked: LogprobInputs,
    start: int,
    shard: VocabularyShard,
) -> LogprobOutputs:
    """The logprobs of whole rows ``[R]`` for their tokens, from the columns of all ranks."""
    wanted, given_ids, processed_scale = asked
    ids = (token_ids[:, None],) if given_ids is None else (token_ids[:, None], given_ids)
    num_blocks, count = -(-mode.vocab_size // LAW_BLOCK), min(wanted.top, mode.vocab_size)
    static = {**run.vocab, "start": start, "num_blocks": num_blocks}
    scale = run(law_scale, row_slots, processed_scale) if wanted.of == "processed" else None

    def keys_of_chunk(logits: AnyLogits, ids: tuple[Tensor, ...]) -> Tensor:
        return run(shards.law_keys_of_shard, logits, ids, **static)

    def sums_of_chunk(*rows: Any) -> Tensor:
        return run(shards.law_sums_of_shard, *rows, **static, moment=wanted.entropy, rank=wanted.rank)

    def first_of_chunk(logits: AnyLogits) -> Tensor:
        first = first_tokens(run, logits, None, count)
        # what it tells of NaNs is not read
        return run(shards.candidates_of_shard, first, first, start=start, count=count)

    keys = shard.maximum(in_chunks(run, keys_of_chunk, logits, ids), run)
    sums = shard.total(in_chunks(run, sums_of_chunk, logits, keys, scale, token_ids), run)
    flags = {"num_blocks": num_blocks, "entropy": wanted.entropy, "rank": wanted.rank}
    law, logprobs = run(shards.logprobs_of_shards, (keys, sums, scale), row_slots, ids, **flags)
    if not wanted.top:
        return logprobs
    told = shard.collected(in_chunks(run, first_of_chunk, logits), run).unbind()
    ordered, *_ = run(shards.candidates_of_shards, told, count=count)
    top_ids, top = run(top_logprobs, row_slots, law, ordered, top=wanted.top)
    return logprobs._replace(top_token_ids=top_ids, top=top)


def _draw_from_winners(
    mode: Mode, run: StepRun, logits: AnyLogits, row_slots: RowSlots, shard: VocabularyShard
) -> SampleOutputs:
    """The winners of races over the columns of all ranks, ``[R]``."""
    start, stream = {"start": shard.start}, row_slots.stream

    def winners_of_chunk(logits: AnyLogits, row_slots: RowSlots, largest: Tensor | None, last: Last | None) -> Tensor:
        if not mode.draws:
            blocks = block_maxima(run, logits)
            return run(shards.first_of_shard, logits, blocks, **run.schedule.order.blocks, **start)
        if largest is None:
            rows, row_max = run(shards.rows_of_shard, row_slots, stream=stream, **start), None
            if run.schedule.races_by_bounds:
                return run(shards.winners_of_leaders, *race_by_bounds(run, logits, rows, finds_max=False), **start)
        else:
            rows, row_max, _ = run(shards.raced_rows, largest, row_slots, stream=stream, **start)
        blocks = race_blocks(run, logits, rows, row_max, last)
        race = logits, blocks, rows, row_max, last
        return run(shards.winners_of_blocks, *race, **run.schedule.race.blocks_by_bits, **start)

    largest = _largest(run, logits, shard) if mode.filters_min_p else None
    last = None
    if mode.searches:
        assert largest is not None
        last = _last_kept(mode, run, logits, row_slots, largest, shard)
    winners = in_chunks(run, winners_of_chunk, logits, row_slots, largest, last)
    return run(shards.draw_from_shards, shard.maximum(winners, run), row_slots)


def _largest(run: StepRun, logits: AnyLogits, shard: VocabularyShard) -> Tensor:
    """The largest order key of each row over the columns of all ranks, int32 ``[R, 1]``."""

    def largest_of_chunk(logits: AnyLogits) -> Tensor:
        return run(shards.largest_of_shard, block_maxima(run, logits).keys)

    return shard.maximum(in_chunks(run, largest_of_chunk, logits), run)


def _last_kept(
    mode: Mode, run: StepRun, logits: AnyLogits, row_slots: RowSlots, largest: Tensor, shard: VocabularyShard
) -> Last:
    """The last token ``[R]`` among the columns of this rank that top-k and top-p keep."""
    # Each round parts the range of keys in 16, and sums what is from each part on over all ranks. All rows take all
    # rounds, so that the host waits for nothing. Top-p comes after top-k, whose mass it may be a share of.
    rows, row_max, scale = run(shards.raced_rows, largest, row_slots, stream=row_slots.stream, start=shard.start)
    base = {"base_is_row": mode.base_is_row}
    order, mass = run.schedule.order.blocks, run.schedule.mass.blocks
    every = run(shards.every_key, rows.live)

    def searched(goal: Tensor, *, by_mass: bool) -> KeyRange:
        static = {**(mass if by_mass else order), "by_mass": by_mass}

        def weights_of_chunk(logits: AnyLogits, keys: KeyRange, row_max: Tensor, scale: Tensor) -> Tensor:
            return run(row_masses, run(shards.weights_from_keys, logits, keys, row_max, scale, **static))

        keys = every
        for _ in range(KEY_ROUNDS):
            weights = shard.total(in_chunks(run, weights_of_chunk, logits, keys, row_max, scale), run)
            keys = run(shards.part_of_keys, keys, weights, goal)
        return keys

    def masses_of_chunk(logits: AnyLogits, before: Last, row_max: Tensor, scale: Tensor) -> Tensor:
        return run(row_masses, run(mass_before_winner, logits, before, row_max, scale, **mass).masses)

    def counts_of_chunk(logits: AnyLogits, key: Tensor) -> Tensor:
        return run(shards.count_of_key, logits, key, **order)

    top_k_keys, top_p_keys, goal = searched(rows.top_k, by_mass=False), None, None
    if mode.capacity:  # in mode "top_k" no row has top-p
        reached = run(shards.before_last_key, top_k_keys, **base)
        masses = shard.total(in_chunks(run, masses_of_chunk, logits, reached, row_max, scale), run)
        goal = run(shards.top_p_goal, masses, top_k_keys, rows, row_max, **base)
        top_p_keys = searched(goal, by_mass=True)
    key, kept = run(shards.last_kept_key, top_k_keys, top_p_keys, goal, rows, row_max)
    counts = in_chunks(run, counts_of_chunk, logits, key)
    before = shard.collected(run(row_masses, counts), run).unbind()[: shard.rank]
    return run(shards.last_of_shard, logits, counts, before, key, kept, **order)


def _draw_from_candidates(
    mode: Mode, run: StepRun, logits: AnyLogits, row_slots: RowSlots, shard: VocabularyShard
) -> SampleOutputs:
    """The winners of races among the candidates of whole rows, ``[R]``."""
    stream = row_slots.stream

    def candidates_of_chunk(logits: AnyLogits, row_slots: RowSlots) -> Tensor:
        found = find_candidates(run, logits, row_slots, in_order=False)
        static = {"start": shard.start, "count": mode.capacity}
        return run(shards.candidates_of_shard, found.tokens, found.nan_bits, **static)

    def masses_of_chunk(logits: AnyLogits, row_slots: RowSlots, largest: Tensor) -> Tensor:
        row_max, scale = run(mass_units, largest, row_slots)
        return run(row_masses, run(block_masses, logits, row_max, scale, **run.schedule.mass.blocks))

    told = shard.collected(in_chunks(run, candidates_of_chunk, logits, row_slots), run).unbind()
    if not mode.base_is_row:
        count = mode.vocab_size if mode.vocab_size <= mode.capacity else None
        return run(shards.draw_from_told, told, row_slots, count=count, stream=stream)
    ordered, nan_bits, largest = run(shards.candidates_of_shards, told, count=min(mode.capacity, mode.vocab_size))
    row_mass = shard.total(in_chunks(run, masses_of_chunk, logits, row_slots, largest), run)
    return run(draw_from_candidates, ordered, nan_bits, row_slots, row_mass, stream=stream)
