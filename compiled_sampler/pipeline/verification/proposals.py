"""The distributions that drafts were drawn from, and their laws, for the rules ``rejection`` and ``block``."""

from __future__ import annotations

from torch import Tensor

from compiled_sampler.batch import DraftTable, PickedRows, VerifyInputs
from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import Run
from compiled_sampler.edit_tables import EditInputs
from compiled_sampler.modes import PROCESSED, edits_drafts
from compiled_sampler.passes.laws.law import AnyLaw
from compiled_sampler.passes.maxima import order_maxima_of
from compiled_sampler.pipeline.edits import edited_logits
from compiled_sampler.pipeline.law import chunked_row_law, probability_law, row_law, unfiltered_law
from compiled_sampler.pipeline.scheduling.chunks import in_chunks
from compiled_sampler.pipeline.verification.verify_rows import (
    VerifySchedules,
    edits_of_drafts,
    layout_of,
    num_trials,
    rows_like,
    trial_slots_of,
)
from compiled_sampler.speculation.acceptance import Proposal
from compiled_sampler.speculation.cached_drafts import CachedRows, gathered, rows_of_drafts
from compiled_sampler.speculation.row_layout import proposal_slots


def proposal_of(
    schedules: VerifySchedules, inputs: VerifyInputs, values: Tensor | PickedRows | DraftTable, run: Run
) -> Proposal:
    """The proposals and their law ``[D]``; draft logits pass the target's edits and filters, unless processed."""
    schedule, searched = schedules.drafts, schedules.requests.searches_requests
    if isinstance(values, DraftTable):
        return _cached_proposal(schedules, inputs, values, run)
    if (edits := _edits_of(schedules, inputs)) is not None:
        return _edited_proposal(schedules, inputs, values, edits, run)
    assert isinstance(values, Tensor)  # rows are picked for edits alone
    if schedule.mode.drafts == "probabilities":
        return Proposal(values, probability_law(schedule, values, run, looks=False))
    slots = run(proposal_slots, values, inputs.slots, inputs.num_drafts, searched=searched)
    table = inputs.table if inputs.draft_table is None or schedule.mode.drafts != PROCESSED else inputs.draft_table
    row_slots = RowSlots(table, slots, slots)  # any positions: only noise depends on them, and a law has none
    return Proposal(values, chunked_row_law(schedule, values, row_slots, run)[0])


def _edits_of(schedules: VerifySchedules, inputs: VerifyInputs) -> EditInputs | None:
    """What the edits of draft logits read; None for what no edit changes: also probabilities and processed logits."""
    return inputs.edits if edits_drafts(schedules.drafts.mode) else None


def _edited_proposal(
    schedules: VerifySchedules, inputs: VerifyInputs, values: Tensor | PickedRows, edits: EditInputs, run: Run
) -> Proposal:
    """The proposals ``[D, >=V]`` after edits, which read the position and the history of each draft, and their law."""
    schedule, layout = schedules.drafts, layout_of(schedules, inputs, run)
    row_slots = trial_slots_of(layout, inputs)
    logits = edited_logits(schedule, values, row_slots, edits_of_drafts(layout, edits), run)
    return Proposal(logits, chunked_row_law(schedule, logits, row_slots, run)[0])


def _cached_proposal(schedules: VerifySchedules, inputs: VerifyInputs, table: DraftTable, run: Run) -> Proposal:
    """The proposals in a draft table, and their law ``[D]``: read in place, but for the passes of top-k and top-p.

    These read all rows of a tensor, so a chunk's rows are copied for them; edited logits are copied all.
    """
    schedule, mode, count = schedules.drafts, schedules.drafts.mode, num_trials(schedules.drafts.mode, inputs)
    requests, searched = (inputs.slots, inputs.num_drafts), schedules.requests.searches_requests
    found = run(rows_of_drafts, rows_like(inputs), *requests, table, searched=searched)
    slots, row_ids = (each[:count] for each in found)
    if (edits := _edits_of(schedules, inputs)) is not None:
        return _edited_proposal(schedules, inputs, run(gathered, table, row_ids), edits, run)
    row_slots = RowSlots(inputs.table, slots, slots)  # any positions, as for ``proposal_of``

    def of_chunk(row_ids: Tensor, row_slots: RowSlots) -> AnyLaw:
        if mode.searches or mode.capacity:
            return row_law(schedule, run(gathered, table, row_ids), row_slots, run)[0]
        blocks = run(order_maxima_of, table, row_ids, **schedule.order.reduction)
        return unfiltered_law(schedule, table, blocks, row_slots, row_ids, run)

    return Proposal(CachedRows(table, row_ids), in_chunks(schedule, run, of_chunk, row_ids, row_slots))
