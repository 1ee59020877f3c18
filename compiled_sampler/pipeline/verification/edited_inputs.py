"""The inputs of a step with the logits after edits in place of those before, for the definition, which has no edits."""

from __future__ import annotations

from torch import Tensor

from compiled_sampler.batch import DraftTable, SampleInputs, VerifyInputs
from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import call
from compiled_sampler.edit_tables import EditInputs
from compiled_sampler.modes import Mode, edits_drafts
from compiled_sampler.pipeline.edits import edited_logits
from compiled_sampler.pipeline.scheduling.schedule import schedule_for
from compiled_sampler.pipeline.verification.verify_rows import (
    edits_of_drafts,
    layout_of,
    row_slots_of,
    trial_slots_of,
    verify_schedules,
)
from compiled_sampler.speculation.cached_drafts import gathered, rows_of_drafts


def edited_inputs(mode: Mode, inputs: SampleInputs) -> SampleInputs:
    """Inputs of a sampling step with edited logits, float32 ``[R, V]``, and no edits; in eager torch."""
    if inputs.edits is None:
        return inputs
    schedule = schedule_for(mode, inputs.logits.shape[0], inputs.logits.device, is_edited=True)
    row_slots = RowSlots(inputs.table, inputs.slots, inputs.positions)
    logits = edited_logits(schedule, inputs.logits, row_slots, _in_a_copy(inputs.edits), call)
    return inputs._replace(logits=logits, edits=None)


def edited_verify_inputs(mode: Mode, inputs: VerifyInputs) -> VerifyInputs:
    """Inputs of a verification with edited logits of target and drafts, and no edits; in eager torch."""
    if inputs.edits is None:
        return inputs
    schedules = verify_schedules(mode, inputs)
    layout = layout_of(schedules, inputs, call)
    logits, edits = inputs.logits, _in_a_copy(inputs.edits)
    if not mode.from_probabilities:
        logits = edited_logits(schedules.rows, logits, row_slots_of(layout, inputs), edits, call)
    proposals = inputs.proposals
    if isinstance(proposals, DraftTable):
        _, row_ids = rows_of_drafts(inputs.logits, inputs.slots, inputs.num_drafts, proposals)
        proposals = gathered(proposals, row_ids[: len(layout.trials.row_ids)])
    if isinstance(proposals, Tensor) and edits_drafts(mode) and len(proposals):
        row_slots, of_drafts = trial_slots_of(layout, inputs), edits_of_drafts(layout, edits)
        proposals = edited_logits(schedules.drafts, proposals[: len(row_slots.slots)], row_slots, of_drafts, call)
    return inputs._replace(logits=logits, proposals=proposals, edits=None)


def _in_a_copy(edits: EditInputs) -> EditInputs:
    """Edits that leave the caller's logits as they are."""
    return edits._replace(leave=False)
