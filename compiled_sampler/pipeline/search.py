"""Rows whose filters may keep tokens beyond the candidates: what the first pass tells, and the exact threshold."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_sampler.core.rows import Entries, Rows
from compiled_sampler.core.stage import Run, any_of, both
from compiled_sampler.exact.row_race import race_and_weigh
from compiled_sampler.exact.threshold import (
    Threshold,
    Weighed,
    block_masses,
    known_threshold,
    order_keys,
    row_masses,
    threshold_by_keys,
    unknown_threshold,
    weigh,
    wide_threshold,
)
from compiled_sampler.passes.maxima import BlockMaxima, mass_units, order_maxima
from compiled_sampler.pipeline.candidates import ordered_candidates, unordered_candidates
from compiled_sampler.pipeline.schedule import Schedule


class Candidates(NamedTuple):
    """The candidates of rows and what their filters need besides."""

    tokens: Tensor
    """int64 ``[R, min(C, V)]``, packed (order key, id)."""
    magnitudes: Tensor
    """int32 ``[R, B]``, ``nan_bits`` of parts of each row."""
    row_mass: Tensor | None
    """int64 ``[R]``, the mass of the row; None where top-p is a share of the mass after top-k."""


class Searched(NamedTuple):
    """What is known of rows before their threshold is searched."""

    ordered: Tensor | None
    """int64 ``[R, C]``, packed keys of the candidates in descending order; None where the mode has none."""
    magnitudes: Tensor
    """int32 ``[R, B]``, ``nan_bits`` of parts of each row."""
    rows: Rows
    """``[R]``, parameters."""
    row_max: Tensor
    """float32 ``[R]``, the largest logit."""
    known: Threshold
    """``[R]``, what is known without a search."""
    raced: Tensor | None
    """int64 ``[R, n]``, winners of the rows that raced meanwhile; None where none did."""


def block_maxima(schedule: Schedule, logits: Tensor, run: Run, *, names: bool = False) -> BlockMaxima:
    """The largest key of each block of a row and, if the schedule or ``names`` asks for it, its token."""
    return run(order_maxima, logits, **schedule.order.reduction, names=names or schedule.names_tokens)


def find_candidates(
    schedule: Schedule, logits: Tensor, entries: Entries, run: Run, *, in_order: bool = True
) -> Candidates:
    """The candidates of each row and, if top-p is a share of the whole row, the row's mass.

    Args:
        schedule: of the step.
        logits: ``[R, >=V]``.
        entries: ``[R]``.
        run: how a stage is run.
        in_order: whether candidates must be in descending order.
    """
    narrow = ordered_candidates if in_order else unordered_candidates
    blocks = _stored_maxima(schedule, logits, run)
    if not schedule.mode.base_is_row:
        return Candidates(narrow(schedule, logits, blocks.keys, run), blocks.magnitudes, None)

    def weighed() -> Tensor:
        row_max, scale = run(mass_units, blocks.keys, entries)
        return run(row_masses, run(block_masses, logits, row_max, scale, **schedule.mass.blocks))

    chains = (lambda: narrow(schedule, logits, blocks.keys, run), weighed)
    tokens, row_mass = both(run, logits.device, *chains)
    return Candidates(tokens, blocks.magnitudes, row_mass)


def search(
    schedule: Schedule, logits: Tensor, entries: Entries, stream: int, run: Run, *, races: bool = False
) -> Searched:
    """The candidates if the mode has any, each row's parameters, maximum and mass, and the thresholds these tell.

    Small kernels narrow the row, and a pass over it weighs it; both need the first pass alone, so they may overlap.

    Args:
        schedule: of the step.
        logits: ``[R, >=V]``.
        entries: ``[R]``.
        stream: of the noise.
        run: how a stage is run.
        races: whether rows that are sure to race do so at once.
    """
    mode = schedule.mode
    vocab = {"vocab_size": mode.vocab_size}
    if not mode.capacity:
        keys, magnitudes, _ = block_maxima(schedule, logits, run)
        rows, row_max, known = run(unknown_threshold, keys, entries, **vocab, stream=stream)
        return Searched(None, magnitudes, rows, row_max, known, None)
    blocks = _stored_maxima(schedule, logits, run)

    def beside() -> tuple[Weighed, Tensor, Tensor | None]:
        weighed = run(weigh, blocks.keys, entries, **vocab, capacity=mode.capacity, stream=stream)
        masses, raced = _weighed(schedule, logits, weighed, run, races=races)
        return weighed, run(row_masses, masses), raced

    chains = (lambda: ordered_candidates(schedule, logits, blocks.keys, run), beside)
    ordered, (weighed, row_mass, raced) = both(run, logits.device, *chains)
    rows, row_max, _ = weighed
    known = run(known_threshold, ordered, rows, row_mass, **vocab, base_is_row=mode.base_is_row)
    return Searched(ordered, blocks.magnitudes, rows, row_max, known, raced)


def threshold_of(schedule: Schedule, logits: Tensor, searched: Searched, run: Run) -> Tensor:
    """The last token that top-k and top-p keep, of every row: int64 ``[R]``, packed (order key, id)."""
    mode, known = schedule.mode, searched.known
    base = {"vocab_size": mode.vocab_size, "base_is_row": mode.base_is_row}
    if schedule.skips_rows:
        return run(wide_threshold, logits, known, searched.row_max, searched.rows, **base)
    if not any_of(run, known.pending):
        return known.packed
    keys = run(order_keys, logits, vocab_size=mode.vocab_size)
    return run(threshold_by_keys, keys, known, searched.rows, **base)


def _weighed(
    schedule: Schedule, logits: Tensor, weighed: Weighed, run: Run, *, races: bool
) -> tuple[Tensor, Tensor | None]:
    """Parts of the mass of each row and, with ``races``, the winners of rows that are sure to race."""
    if races:
        return run(race_and_weigh, logits, weighed, **schedule.mass.blocks)
    return run(block_masses, logits, weighed.row_max, weighed.rows.scale, **schedule.mass.blocks), None


def _stored_maxima(schedule: Schedule, logits: Tensor, run: Run) -> BlockMaxima:
    """The first pass that narrowing begins with."""
    return run(order_maxima, logits, **schedule.stored.reduction)
