"""Filters that look at a whole row: what they drop becomes -inf in the copy of the logits that all later passes read.

Each filter reads the rows as the one before left them, and keeps a token at least. So top-k, top-p, min_p, every rule
of verification, probabilities and logprobs see masked tokens and need not know of the filters.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from compiled_sampler.core.rows import RowSlots, with_scale
from compiled_sampler.edits.row_filters import MinK, PLess, TopNSigma, TypicalP, Xtc
from compiled_sampler.edits.tables import RowFilters
from compiled_sampler.passes import row_filters
from compiled_sampler.passes.candidates import select
from compiled_sampler.passes.maxima import mass_units
from compiled_sampler.passes.row_filters import NUM_DIGITS, MassUnits
from compiled_sampler.pipeline.chunks import in_chunks, in_chunks_of
from compiled_sampler.pipeline.schedule import StepRun
from compiled_sampler.pipeline.search import block_maxima


def filtered_logits(run: StepRun, logits: Tensor, row_slots: RowSlots, filters: RowFilters) -> Tensor:
    """The logits after the filters, float32 ``[R, V]`` in new memory; rows without a filter keep their bits."""

    def filtered_chunk(logits: Tensor, row_slots: RowSlots) -> Tensor:
        for table in filters.tables:
            logits = _FILTERS[type(table)](run, logits, row_slots, filters.scale, table)
        return logits

    return in_chunks(run, filtered_chunk, logits, row_slots)


def _top_n_sigma(run: StepRun, logits: Tensor, row_slots: RowSlots, scale: Tensor, top_n_sigma: TopNSigma) -> Tensor:
    """The logits after top-n-sigma."""
    units = run(row_filters.distance_units, *run(row_filters.logit_ends, logits, **run.schedule.order.blocks))
    sums = run(row_filters.distance_sums, logits, *units, **run.schedule.mass.blocks)
    longest = run(row_filters.longest_kept, sums, *units, row_slots.slots, top_n_sigma)
    return run(row_filters.within_distance, logits, units[0], longest, **run.vocab)


def _min_k(run: StepRun, logits: Tensor, row_slots: RowSlots, scale: Tensor, min_k: MinK) -> Tensor:
    """The logits after min-k."""

    def chunk_cliffs(logits: Tensor, slots: Tensor) -> Tensor:
        keys = run(row_filters.drop_keys, logits, **run.vocab)
        # On the CPU numpy sorts five times as fast as torch.
        ordered = (
            run(row_filters.descending, keys) if run.schedule.by_triton else run(select, keys, count=keys.shape[1])
        )
        return run(row_filters.cliff_logit, ordered, slots, min_k)

    # A sort holds keys and places of all tokens twice, also where stages are compiled.
    least = in_chunks_of(run.schedule.eager_chunk_rows, chunk_cliffs, logits, row_slots.slots)
    return run(row_filters.above_cliff, logits, least, **run.vocab)


def _p_less(run: StepRun, logits: Tensor, row_slots: RowSlots, scale: Tensor, p_less: PLess) -> Tensor:
    """The logits after p-less."""
    units = _units(run, logits, row_slots, scale)
    sums = run(row_filters.mass_sums, logits, units, **run.schedule.mass.blocks, squares=True)
    cut = run(row_filters.p_less_cut, sums, units.row_max, row_slots.slots, p_less)
    return run(row_filters.without_light, logits, units, cut, **run.vocab)


def _typical_p(run: StepRun, logits: Tensor, row_slots: RowSlots, scale: Tensor, typical_p: TypicalP) -> Tensor:
    """The logits after typical-p."""
    units = _units(run, logits, row_slots, scale)
    sums = run(row_filters.mass_sums, logits, units, **run.schedule.mass.blocks, moment=True)
    search = run(row_filters.typical_search, sums, units, row_slots.slots, typical_p, **run.vocab)
    for _ in range(NUM_DIGITS):
        masses = run(row_filters.digit_masses, logits, search, **run.vocab)
        search = run(row_filters.with_digit, search, masses)
    return run(row_filters.within_typical, logits, search, **run.vocab)


def _xtc(run: StepRun, logits: Tensor, row_slots: RowSlots, scale: Tensor, xtc: Xtc) -> Tensor:
    """The logits after the exclusion of top choices."""
    units = _units(run, logits, row_slots, scale)
    sums = run(row_filters.mass_sums, logits, units, **run.schedule.mass.blocks)
    cut = run(row_filters.top_choice_mass, sums, units.row_max, row_slots, xtc)
    last = run(row_filters.last_top_choices, logits, units, cut, **run.schedule.mass.blocks)
    return run(row_filters.without_first, logits, last, **run.vocab)


def _units(run: StepRun, logits: Tensor, row_slots: RowSlots, scale: Tensor) -> MassUnits:
    """The units of the masses of each row ``[R]``."""
    keys = block_maxima(run, logits).keys
    return MassUnits(*run(mass_units, keys, with_scale(row_slots, scale)))


_FILTERS: dict[type, Callable[..., Tensor]] = {
    TopNSigma: _top_n_sigma,
    MinK: _min_k,
    PLess: _p_less,
    TypicalP: _typical_p,
    Xtc: _xtc,
}
"""The stages of each filter by the type of its table."""
