"""Rows in order: their candidates, and the exact threshold of rows whose filters may keep tokens beyond these."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from compiled_sampler.core.order import Last, last_of
from compiled_sampler.core.rows import RowParams, RowSlots
from compiled_sampler.exact.row_race import race_and_weigh
from compiled_sampler.exact.threshold import (
    FlaggedRows,
    Threshold,
    block_masses,
    flag_exceeding_rows,
    order_keys,
    row_masses,
    search_in_order,
    search_threshold,
    threshold_from_candidates,
    threshold_without_candidates,
)
from compiled_sampler.passes import candidates
from compiled_sampler.passes.blocks import AnyLogits, values_of
from compiled_sampler.passes.candidates import FAN_OUT, MOST_CHOSEN, STORED_BLOCK
from compiled_sampler.passes.kept import Cut, cut_at_threshold
from compiled_sampler.passes.maxima import BlockMaxima, mass_units, order_maxima
from compiled_sampler.pipeline.chunks import in_chunks_of
from compiled_sampler.pipeline.schedule import StepRun

_FUSED: dict[Any, Callable[..., Tensor]] = {
    candidates.all_coarser: candidates.choose_blocks,
    candidates.child_blocks: candidates.choose_child_blocks,
    candidates.child_tokens: candidates.choose_child_tokens,
}
"""From stages that find the blocks of a level to stages that also choose among these blocks, in one kernel."""


def ordered_candidates(run: StepRun, logits: AnyLogits, keys: Tensor) -> Tensor:
    """The first ``min(C, V)`` tokens of each row's order, int64 ``[R, min(C, V)]`` packed keys, in descending order."""
    chosen = unordered_candidates(run, logits, keys)
    return chosen if run.schedule.orders_candidates else run(candidates.sort, chosen, count=chosen.shape[1])


def unordered_candidates(run: StepRun, logits: AnyLogits, keys: Tensor) -> Tensor:
    """The first ``min(C, V)`` tokens of each row's order, int64 ``[R, min(C, V)]`` packed (order key, id)."""
    # They are in descending order only if schedule.orders_candidates.
    sizes, vocab_size = run.schedule.levels, run.mode.vocab_size
    if sizes[0] >= STORED_BLOCK:
        picked = _level(run, candidates.all_coarser, keys, ratio=sizes[0] // STORED_BLOCK)
    else:
        picked = _level(run, candidates.all_blocks, logits, vocab_size=vocab_size, size=sizes[0])
    for parent, child in itertools.pairwise(sizes):
        ratio = parent // child
        if child >= STORED_BLOCK:
            picked = _level(run, candidates.child_blocks, keys, picked, ratio=ratio, size=child // STORED_BLOCK)
        else:
            blocks = {"vocab_size": vocab_size, "ratio": ratio, "size": child}
            picked = _level(run, candidates.child_tokens, logits, picked, **blocks)
    return picked


def _level(run: StepRun, stage: Any, /, *tensors: AnyLogits, **static: int) -> Tensor:
    """The first ``min(C, n)`` of the n blocks of a level, int64 ``[R, min(C, n)]`` packed (key, block index)."""
    # Finding and choosing them is one kernel where the schedule fuses levels and a block has at most FAN_OUT parts, two
    # kernels elsewhere.
    capacity = run.mode.capacity
    fused = _FUSED.get(stage) if run.schedule.fuses_levels else None
    if fused is not None and (static.get("size") or static["ratio"]) <= FAN_OUT:  # in the first level a ratio alone
        return run(fused, *tensors, **static, count=capacity)
    packed = run(stage, *tensors, **static)
    return _largest(run, packed, min(capacity, packed.shape[1]))


def _largest(run: StepRun, packed: Tensor, count: int) -> Tensor:
    """The ``count`` largest packed keys of each row, int64 ``[R, count]``."""
    # choose requires ascending ids in its input and returns the keys in the order of its input, so ids stay ascending.
    if run.schedule.picks_by == "select":
        return run(candidates.select, packed, count=count)
    if run.schedule.picks_by == "rank":
        return run(candidates.place, packed, run(candidates.rank, packed), count=count)
    if count == packed.shape[1]:
        return packed
    return run(candidates.choose if packed.shape[1] <= MOST_CHOSEN else candidates.sort, packed, count=count)


class Candidates(NamedTuple):
    """The candidates of each row, and the other inputs of a draw among them."""

    tokens: Tensor
    """int64 ``[R, min(C, V)]``, packed (order key, id)."""
    nan_bits: Tensor
    """int32 ``[R, B]``, ``nan_bits`` of the parts of each row."""
    row_mass: Tensor | None
    """int64 ``[R]``, the mass of the whole row; None where top-p is a share of the mass after top-k."""


class SearchInputs(NamedTuple):
    """What the search for each row's threshold starts from, and a draw that needs no search."""

    ordered: Tensor | None
    """int64 ``[R, C]``, packed keys of the candidates in descending order; None where the mode has no candidates."""
    nan_bits: Tensor
    """int32 ``[R, B]``, ``nan_bits`` of the parts of each row."""
    rows: RowParams
    """Parameters ``[R]``."""
    row_max: Tensor
    """float32 ``[R]``, the largest logit."""
    known: Threshold
    """The thresholds ``[R]`` that follow without a search, and flags of the rows that need one."""
    raced: Tensor | None
    """int64 ``[R, n]``, winners of the rows that raced in the pass that computed masses; None if no row did."""


def block_maxima(run: StepRun, logits: AnyLogits, *, names: bool = False) -> BlockMaxima:
    """The largest order key of each block, ``[R, B]``; with ``names``, or by Triton, its token id too."""
    return run(order_maxima, logits, **run.schedule.order.reduction, names=names or run.schedule.by_triton)


def find_candidates(
    run: StepRun, logits: AnyLogits, row_slots: RowSlots, *, maxima: BlockMaxima | None = None, in_order: bool = True
) -> Candidates:
    """The candidates of each row and, if top-p is a share of the whole row's mass, that mass."""
    # maxima are those of the schedule's first pass, if they are known.
    narrow = ordered_candidates if in_order else unordered_candidates
    blocks = _stored_maxima(run, logits) if maxima is None else maxima
    if not run.mode.base_is_row:
        return Candidates(narrow(run, logits, blocks.keys), blocks.nan_bits, None)

    def weighed() -> Tensor:
        row_max, scale = run(mass_units, blocks.keys, row_slots)
        return run(row_masses, run(block_masses, logits, row_max, scale, **run.schedule.mass.blocks))

    chains = (lambda: narrow(run, logits, blocks.keys), weighed)
    tokens, row_mass = run.overlap(values_of(logits).device, *chains)
    return Candidates(tokens, blocks.nan_bits, row_mass)


def candidates_and_thresholds(
    run: StepRun, logits: AnyLogits, row_slots: RowSlots, *, maxima: BlockMaxima | None = None, races: bool = False
) -> SearchInputs:
    """Candidates if the mode has any, parameters, largest logits, and the thresholds that follow without a search."""
    # Narrowing to candidates runs many small kernels; the row's mass takes a pass over the logits. Both depend only on
    # the first pass, so they may overlap.
    # With races, rows that certainly keep more tokens than the candidates race in the pass that computes masses.
    mode, stream = run.mode, row_slots.stream
    if not mode.capacity:
        keys, nan_bits, _ = block_maxima(run, logits)
        rows, row_max, known = run(threshold_without_candidates, keys, row_slots, **run.vocab, stream=stream)
        return SearchInputs(None, nan_bits, rows, row_max, known, None)
    blocks = _stored_maxima(run, logits) if maxima is None else maxima

    def beside() -> tuple[FlaggedRows, Tensor, Tensor | None]:
        flagged = run(flag_exceeding_rows, blocks.keys, row_slots, **run.vocab, capacity=mode.capacity, stream=stream)
        if races:
            masses, raced = run(race_and_weigh, logits, flagged, **run.schedule.mass.blocks)
        else:
            units = flagged.row_max, flagged.rows.scale
            masses, raced = run(block_masses, logits, *units, **run.schedule.mass.blocks), None
        return flagged, run(row_masses, masses), raced

    chains = (lambda: ordered_candidates(run, logits, blocks.keys), beside)
    ordered, (flagged, row_mass, raced) = run.overlap(values_of(logits).device, *chains)
    rows, row_max, _ = flagged
    known = run(threshold_from_candidates, ordered, rows, row_mass, **run.vocab, base_is_row=mode.base_is_row)
    return SearchInputs(ordered, blocks.nan_bits, rows, row_max, known, raced)


def threshold_of(run: StepRun, logits: Tensor, search_inputs: SearchInputs) -> Tensor:
    """Packed key of the last token that top-k and top-p keep, int64 ``[R]``, searched where not known yet."""
    mode, known = run.mode, search_inputs.known
    base = {**run.vocab, "base_is_row": mode.base_is_row}
    if run.schedule.by_triton:
        return run(search_threshold, logits, known, search_inputs.row_max, search_inputs.rows, **base)
    if not run.any_row(known.is_open):
        return known.packed

    def searched_chunk(logits: Tensor, known: Threshold, rows: RowParams) -> Tensor:
        return run(search_in_order, run(order_keys, logits, **run.vocab), known, rows, **base)

    # A key of 8 bytes for each token, several times, also where stages are compiled.
    return in_chunks_of(run.schedule.eager_chunk_rows, searched_chunk, logits, known, search_inputs.rows)


def searched_cut(run: StepRun, logits: Tensor, row_slots: RowSlots) -> tuple[Cut, SearchInputs]:
    """Which tokens the filters keep in each row ``[R]`` of a mode that searches, and what the search started from."""
    search_inputs = candidates_and_thresholds(run, logits, row_slots)
    threshold: Tensor | Last = threshold_of(run, logits, search_inputs)
    if not run.schedule.by_triton:
        threshold = run(last_of, threshold, by_key=True)
    return cut_at_threshold(threshold, search_inputs.row_max, search_inputs.rows), search_inputs


def _stored_maxima(run: StepRun, logits: AnyLogits) -> BlockMaxima:
    """The largest order key of each block of ``STORED_BLOCK`` tokens, ``[R, B]``, which narrowing starts from."""
    return run(order_maxima, logits, **run.schedule.stored.reduction)
