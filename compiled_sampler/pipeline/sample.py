"""A token for every row: the stages of a draw in their order, for each mode, and those that laws share with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import SampleOutputs
from compiled_sampler.core.order import Last, is_on_gpu, last_of
from compiled_sampler.core.rows import Entries, Rows, gather_rows
from compiled_sampler.core.stage import Run, any_of, both
from compiled_sampler.exact.row_race import (
    draw_from_all,
    draw_raced,
    race_and_weigh,
    race_beyond,
    race_rows,
    race_top_k,
)
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
from compiled_sampler.exact.winner_check import last_before, preceding, settled, unsearched_last
from compiled_sampler.modes import LARGE_ROWS, SHORT_ROW, SMALL_ROWS, Mode, are_bounded, row_class
from compiled_sampler.passes.bounds import draw_settled, race_bounds, race_leaders
from compiled_sampler.passes.candidates import draw_from_candidates, draw_from_chosen
from compiled_sampler.passes.maxima import BlockMaxima, mass_units, order_maxima, rows_of_blocks
from compiled_sampler.passes.narrowing import STORED_BLOCK
from compiled_sampler.passes.race import draw_from_blocks, first_from_blocks, race_maxima
from compiled_sampler.pipeline.candidates import first_of_order, first_tokens, is_ordered

RACE_BLOCKS = {1: 256, SMALL_ROWS: 512, LARGE_ROWS: 512}
"""Tokens a block of a race over the row, by class of row counts."""

MASS_BLOCKS = {1: 256, SMALL_ROWS: 256, LARGE_ROWS: 512}
"""The same of other passes that compute much and keep one result a block."""

ORDER_BLOCKS = {1: 256, SMALL_ROWS: 1024, LARGE_ROWS: 1024}
"""The same where a pass computes little; all three are measured, not derived."""

SHORT_RACE_BLOCK = 256
"""Tokens a block of a race over a short row: with those of a long one it would not fill a GPU."""

CPU_RACE_BLOCK = 1024
"""Tokens a block of a race on the CPU: there the end of a block costs more than padding the row does."""


class Candidates(NamedTuple):
    """What the first pass over rows leads to."""

    tokens: Tensor
    """int64 ``[R, C]``, packed keys of the candidates, as they were narrowed."""
    magnitudes: Tensor
    """int32 ``[R, B]``, ``nan_bits`` of parts of each row."""
    row_mass: Tensor | None
    """int64 ``[R]``, the mass of the row, where that is asked for."""


class Searched(NamedTuple):
    """What a draw or a law needs of rows whose filters may keep tokens beyond the candidates."""

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
    """int64 ``[R, n]``, winners of rows that raced meanwhile; None where none did."""


def first(mode: Mode, logits: Tensor, slots: Tensor, run: Run) -> SampleOutputs:
    """The first token of each row's order."""
    blocks = first_pass(mode, logits, run)
    return run(first_from_blocks, logits, blocks, slots, **cut_for(mode, logits, ORDER_BLOCKS))


def first_pass(mode: Mode, logits: Tensor, run: Run, *, names: bool = False) -> BlockMaxima:
    """The best key of each block of ``ORDER_BLOCKS``, and its token: on a GPU it costs less than a look at a block."""
    return run(order_maxima, logits, **cut_for(mode, logits, ORDER_BLOCKS), names=names or is_on_gpu(logits))


def draw(mode: Mode, logits: Tensor, entries: Entries, stream: int, run: Run) -> SampleOutputs:
    """A token for every row, whatever the mode applies."""
    if mode.searches:
        return _draw_searched(mode, logits, entries, stream, run)
    if mode.capacity:
        return _draw_ordered(mode, logits, entries, stream, run)
    if _races_by_bounds(mode, logits):
        return _draw_bounded(mode, logits, run(gather_rows, entries, stream=stream), run)
    rows, row_max = _parameters(mode, logits, entries, stream, run)
    return _draw_whole(mode, logits, rows, row_max, None, run)


def _parameters(mode: Mode, logits: Tensor, entries: Entries, stream: int, run: Run) -> tuple[Rows, Tensor | None]:
    """The parameters of each row, and its largest logit where min_p asks for it."""
    if not mode.filters_min_p:
        return run(gather_rows, entries, stream=stream), None
    rows, row_max = run(rows_of_blocks, first_pass(mode, logits, run).keys, entries, stream=stream)
    return rows, row_max


def _draw_whole(
    mode: Mode, logits: Tensor, rows: Rows, row_max: Tensor | None, last: Last | None, run: Run
) -> SampleOutputs:
    """Race over the whole row; on a GPU a block names its winner, as in ``first_pass``."""
    blocked = _race_cut(mode, logits)
    blocks = run(race_maxima, logits, rows, row_max, last, **blocked, names=is_on_gpu(logits))
    return run(draw_from_blocks, logits, blocks, rows, row_max, last, **blocked)


def _race_cut(mode: Mode, logits: Tensor) -> dict[str, int]:
    """``cut_for`` a race over the whole row."""
    cut = cut_for(mode, logits, RACE_BLOCKS)
    if is_on_gpu(logits):
        return {**cut, "block": SHORT_RACE_BLOCK} if mode.vocab_size <= SHORT_ROW else cut
    return {**cut, "block": CPU_RACE_BLOCK} if mode.vocab_size >= CPU_RACE_BLOCK else cut


def _races_by_bounds(mode: Mode, logits: Tensor) -> bool:
    """Whether bounds take less than scores: for many logits on a GPU, if its arithmetic gives NaN a positive sign."""
    is_cuda = is_on_gpu(logits) and torch.version.hip is None
    return is_cuda and are_bounded(logits.shape[0], mode.vocab_size, filters_min_p=mode.filters_min_p)


def _draw_bounded(mode: Mode, logits: Tensor, rows: Rows, run: Run) -> SampleOutputs:
    """Race over the whole row by bounds: for many logits on a GPU, where the instructions of scores bind."""
    cut = _race_cut(mode, logits)
    bounds = run(race_bounds, logits, rows, **cut, filters_min_p=mode.filters_min_p)
    leaders = run(race_leaders, logits, bounds, rows, **cut)
    best, _, unsettled, row_max = leaders
    winners = run(race_rows, logits, unsettled, rows, row_max, best, vocab_size=mode.vocab_size)
    return run(draw_settled, leaders, winners, rows.live)


def _draw_ordered(mode: Mode, logits: Tensor, entries: Entries, stream: int, run: Run) -> SampleOutputs:
    """Filter the first ``capacity`` tokens of the order, and race among them."""
    found = candidates(mode, logits, entries, run, first_tokens)
    stage = draw_from_candidates if is_ordered(logits) else draw_from_chosen
    return run(stage, found.tokens, found.magnitudes, entries, found.row_mass, stream=stream)


def _draw_searched(mode: Mode, logits: Tensor, entries: Entries, stream: int, run: Run) -> SampleOutputs:
    """Race among the candidates where these suffice; search the others' thresholds, and race over their rows."""
    if not is_on_gpu(logits):
        return _draw_settled(mode, logits, search(mode, logits, entries, stream, run), run)
    if not mode.capacity:
        return _draw_top_k(mode, logits, run(gather_rows, entries, stream=stream), run)
    ordered, magnitudes, rows, row_max, known, raced = search(mode, logits, entries, stream, run, races=True)
    base = {"vocab_size": mode.vocab_size, "base_is_row": mode.base_is_row}
    winners = run(race_beyond, logits, known, rows, row_max, raced, **base)
    return run(draw_from_all, ordered, winners, magnitudes, rows, row_max, known)


def _draw_settled(mode: Mode, logits: Tensor, searched: Searched, run: Run) -> SampleOutputs:
    """Race over the whole row; where the winner may be dropped, search the threshold and race again.

    On the CPU a pass costs much less than a search, so that every row races.
    """
    ordered, _, rows, row_max, known, _ = searched
    cut = {"vocab_size": mode.vocab_size}
    drawn = _draw_whole(mode, logits, rows, row_max, run(unsearched_last, known), run)
    if not any_of(run, known.pending):
        return drawn
    before = run(last_before, logits, drawn.token_ids, **cut)
    parts = run(preceding, logits, before, row_max, rows.scale, **cut_for(mode, logits))
    known = run(settled, ordered, known, parts, rows, **cut, base_is_row=mode.base_is_row)
    if not any_of(run, known.pending):
        return drawn
    last = run(last_of, threshold_of(mode, logits, searched._replace(known=known), run))
    return _draw_whole(mode, logits, rows, row_max, last, run)


def _draw_top_k(mode: Mode, logits: Tensor, rows: Rows, run: Run) -> SampleOutputs:
    """Search and race without a pass before, and without candidates."""
    winners, magnitudes = run(race_top_k, logits, rows, vocab_size=mode.vocab_size)
    return run(draw_raced, winners, magnitudes, rows.live)


def candidates(
    mode: Mode, logits: Tensor, entries: Entries, run: Run, narrowed: Callable[..., Tensor] = first_of_order
) -> Candidates:
    """The first pass over the row, the candidates that it leads to and, if the mode asks for it, the row's mass.

    Args:
        mode: what it applies.
        logits: ``[R, >=V]``.
        entries: ``[R]``.
        run: how a stage is run.
        narrowed: ``first_of_order``, or ``first_tokens`` where the order of the candidates does not matter.
    """
    blocks = _stored_blocks(mode, logits, run)
    if not mode.base_is_row:
        return Candidates(narrowed(mode, logits, blocks.keys, run), blocks.magnitudes, None)

    def weighed() -> Tensor:
        row_max, scale = run(mass_units, blocks.keys, entries)
        return run(row_masses, run(block_masses, logits, row_max, scale, **cut_for(mode, logits)))

    tokens, row_mass = both(run, logits.device, lambda: narrowed(mode, logits, blocks.keys, run), weighed)
    return Candidates(tokens, blocks.magnitudes, row_mass)


def search(mode: Mode, logits: Tensor, entries: Entries, stream: int, run: Run, *, races: bool = False) -> Searched:
    """The first pass, the candidates if the mode has any, each row's parameters and maximum, and what these tell.

    Small kernels narrow the row, and a pass over it weighs it; both need the first pass alone, so they may overlap.

    Args:
        mode: what it applies.
        logits: ``[R, >=V]``.
        entries: ``[R]``.
        stream: of the noise.
        run: how a stage is run.
        races: whether rows that are sure to race do so at once.
    """
    if not mode.capacity:
        keys, magnitudes, _ = first_pass(mode, logits, run)
        rows, row_max, known = run(unknown_threshold, keys, entries, vocab_size=mode.vocab_size, stream=stream)
        return Searched(None, magnitudes, rows, row_max, known, None)
    blocks = _stored_blocks(mode, logits, run)
    cut = {"vocab_size": mode.vocab_size}

    def beside() -> tuple[Weighed, Tensor, Tensor | None]:
        weighed = run(weigh, blocks.keys, entries, **cut, capacity=mode.capacity, stream=stream)
        masses, raced = _weighed(mode, logits, weighed, run, races=races)
        return weighed, run(row_masses, masses), raced

    chains = (lambda: first_of_order(mode, logits, blocks.keys, run), beside)
    ordered, (weighed, row_mass, raced) = both(run, logits.device, *chains)
    rows, row_max, _ = weighed
    known = run(known_threshold, ordered, rows, row_mass, **cut, base_is_row=mode.base_is_row)
    return Searched(ordered, blocks.magnitudes, rows, row_max, known, raced)


def _weighed(mode: Mode, logits: Tensor, weighed: Weighed, run: Run, *, races: bool) -> tuple[Tensor, Tensor | None]:
    """Parts of the mass of each row and, if rows that are sure to race do so meanwhile, their winners."""
    if races:
        return run(race_and_weigh, logits, weighed, **cut_for(mode, logits))
    return run(block_masses, logits, weighed.row_max, weighed.rows.scale, **cut_for(mode, logits)), None


def _stored_blocks(mode: Mode, logits: Tensor, run: Run) -> BlockMaxima:
    """The first pass that narrowing begins with."""
    return run(order_maxima, logits, vocab_size=mode.vocab_size, block=STORED_BLOCK)


def threshold_of(mode: Mode, logits: Tensor, searched: Searched, run: Run) -> Tensor:
    """The last token that top-k and top-p keep, of every row: int64 ``[R]``, packed (order key, id)."""
    base, known = {"vocab_size": mode.vocab_size, "base_is_row": mode.base_is_row}, searched.known
    if is_on_gpu(logits):
        return run(wide_threshold, logits, known, searched.row_max, searched.rows, **base)
    if not any_of(run, known.pending):
        return known.packed
    keys = run(order_keys, logits, vocab_size=mode.vocab_size)
    return run(threshold_by_keys, keys, known, searched.rows, **base)


def cut_for(mode: Mode, rows: Tensor, blocks: Mapping[int, int] = MASS_BLOCKS) -> dict[str, int]:
    """The static arguments of a pass over rows in blocks; of the rows only their number and device are used.

    On the CPU a smaller block that divides the row is preferred: padding is a copy there.

    Args:
        mode: gives V.
        rows: of the pass.
        blocks: tokens a block by class of row counts.
    """
    block = blocks[row_class(rows.shape[0], rows.device)]
    divisor = math.gcd(mode.vocab_size, block)
    if not is_on_gpu(rows) and divisor >= STORED_BLOCK:
        block = divisor
    return {"vocab_size": mode.vocab_size, "block": block}
