"""The rows of a verification: its schedules, the request and position of each row, and what drafts were drawn from."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_sampler.batch import DraftTable, PickedRows, VerifyInputs
from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import Run
from compiled_sampler.edit_tables import EditInputs
from compiled_sampler.modes import Mode, edits_drafts, proposing
from compiled_sampler.pipeline.edits import drawing_schedule
from compiled_sampler.pipeline.scheduling.schedule import Schedule, schedule_for
from compiled_sampler.speculation.row_layout import Layout, Trials, row_layout


class VerifySchedules(NamedTuple):
    """The schedules for the three batch sizes that a verification reads."""

    rows: Schedule
    """For the R rows of logits."""
    drafts: Schedule
    """For D rows, one per draft: the rows of the proposals, and in a mode without filters the target's that judge."""
    requests: Schedule
    """For N rows, the final row of each request."""


def verify_schedules(mode: Mode, inputs: VerifyInputs) -> VerifySchedules:
    """The schedules for R rows, D drafts and N requests."""
    logits, device, is_edited = inputs.logits, inputs.logits.device, inputs.edits is not None

    def of(mode: Mode, rows: int) -> Schedule:
        return schedule_for(mode, rows, device, is_edited=is_edited)

    num_rows = rows_like(inputs).shape[0]
    rows = drawing_schedule(mode, logits, inputs.edits, inputs.logprobs) if mode.draws_rows else of(mode, num_rows)
    return VerifySchedules(rows, of(proposing(mode), num_trials(mode, inputs)), of(mode, inputs.slots.shape[0]))


def rows_like(inputs: VerifyInputs) -> Tensor:
    """A tensor ``[R, ...]`` of as many rows as the requests have; what it holds is not for use."""
    return inputs.logits if inputs.rows is None else inputs.rows.row_ids


def target_logits(inputs: VerifyInputs) -> Tensor | PickedRows:
    """The target's logits ``[R, >=V]``, of a chunk where they stand among those of the batch."""
    return inputs.logits if inputs.rows is None else PickedRows(inputs.logits, inputs.rows.row_ids)


def num_trials(mode: Mode, inputs: VerifyInputs) -> int:
    """D: the number of rows of the proposals or, for one-hot drafts, of entries ``N * K``, at least one.

    A draft table has rows for all slots; of those read there are no more than entries, nor than rows of logits.
    """
    values = proposed(mode, inputs)
    if isinstance(values, Tensor):
        return values.shape[0]
    if isinstance(values, PickedRows):
        return values.row_ids.shape[0]
    entries = max(inputs.draft_token_ids.numel(), 1)
    return entries if values is None else min(entries, rows_like(inputs).shape[0])


def layout_of(schedules: VerifySchedules, inputs: VerifyInputs, run: Run) -> Layout:
    """Request, position and draft of each row ``[R]``, and the trials cut to the D drafts that there can be."""
    _, slots, positions, num_drafts, drafts, *_ = inputs
    mode, searched = schedules.requests.mode, schedules.requests.searches_requests
    static = {"vocab_size": mode.vocab_size, "searched": searched}
    layout = run(row_layout, rows_like(inputs), slots, positions, num_drafts, drafts, **static)
    count = num_trials(mode, inputs)
    return layout._replace(trials=Trials(*(each[:count] for each in layout.trials)))


def row_slots_of(layout: Layout, inputs: VerifyInputs) -> RowSlots:
    """The slot and the position of each row ``[R]``."""
    return RowSlots(inputs.table, layout.slots, layout.positions)


def trial_slots_of(layout: Layout, inputs: VerifyInputs) -> RowSlots:
    """The slot and the position of the row that judges each draft ``[D]``, which are those of the draft itself."""
    return RowSlots(inputs.table, layout.trials.slots, layout.trials.positions)


def edits_of_drafts(layout: Layout, edits: EditInputs) -> EditInputs:
    """What edits of the drafts' logits read: a draft has the mask and the tensors of the row ``[D]`` that judges it."""
    return edits_of_rows(edits, layout.trials.row_ids)


def edits_of_rows(edits: EditInputs, row_ids: Tensor) -> EditInputs:
    """What edits of a copy of some rows read, int64 ``[n]`` of those that the edits have tensors for."""
    mask = edits.token_bitmask
    rows = None if mask is None else mask[row_ids]
    return EditInputs(edits.tables, rows, custom=edits.custom, given=tuple(each[row_ids] for each in edits.given))


def proposed(mode: Mode, inputs: VerifyInputs) -> Tensor | PickedRows | DraftTable | None:
    """The proposals ``[D, >=V]`` that drafts were drawn from, or the table with them; None for one-hot drafts.

    There are no more drafts than rows of logits, so rows of the proposals beyond R belong to no draft and are cut.
    Logits to edit are, in a chunk, where they stand among those of the batch.
    """
    values = inputs.proposals
    if not isinstance(values, Tensor):
        return values
    if mode.drafts == "one_hot" or not values.shape[0]:
        return None
    if edits_drafts(mode) and inputs.rows is not None and inputs.rows.proposal_ids is not None:
        return PickedRows(values, inputs.rows.proposal_ids)
    return values[: inputs.logits.shape[0]]
