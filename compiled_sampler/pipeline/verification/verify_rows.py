"""The rows of a verification: its schedules, the request and position of each row, and what drafts were drawn from."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_sampler.batch import DraftTable, VerifyInputs
from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import Run
from compiled_sampler.edit_tables import EditInputs
from compiled_sampler.modes import Mode, proposing
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

    rows = drawing_schedule(mode, logits, inputs.edits) if draws_rows(mode) else of(mode, logits.shape[0])
    return VerifySchedules(rows, of(proposing(mode), num_trials(mode, inputs)), of(mode, inputs.slots.shape[0]))


def draws_rows(mode: Mode) -> bool:
    """Whether every row draws as in sampling, and drafts are compared with what it draws; greedy, by any rule."""
    return mode.rule == "match" or not mode.draws


def num_trials(mode: Mode, inputs: VerifyInputs) -> int:
    """D: the number of rows of the proposals or, for one-hot drafts, of entries ``N * K``, at least one.

    A draft table has rows for all slots; of those read there are no more than entries, nor than rows of logits.
    """
    values = proposed(mode, inputs)
    if isinstance(values, Tensor):
        return values.shape[0]
    entries = max(inputs.draft_token_ids.numel(), 1)
    return entries if values is None else min(entries, inputs.logits.shape[0])


def layout_of(schedules: VerifySchedules, inputs: VerifyInputs, run: Run) -> Layout:
    """Request, position and draft of each row ``[R]``, and the trials cut to the D drafts that there can be."""
    logits, slots, positions, num_drafts, drafts, *_ = inputs
    mode, searched = schedules.requests.mode, schedules.requests.searches_requests
    static = {"vocab_size": mode.vocab_size, "searched": searched}
    layout = run(row_layout, logits, slots, positions, num_drafts, drafts, **static)
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
    mask, row_ids = edits.token_bitmask, layout.trials.row_ids
    rows = None if mask is None else mask[row_ids]
    return EditInputs(edits.tables, rows, custom=edits.custom, given=tuple(each[row_ids] for each in edits.given))


def proposed(mode: Mode, inputs: VerifyInputs) -> Tensor | DraftTable | None:
    """The proposals ``[D, >=V]`` that drafts were drawn from, or the table with them; None for one-hot drafts.

    There are no more drafts than rows of logits, so rows of the proposals beyond R belong to no draft and are cut.
    """
    values = inputs.proposals
    if not isinstance(values, Tensor):
        return values
    if mode.drafts == "one_hot" or not values.shape[0]:
        return None
    return values[: inputs.logits.shape[0]]
