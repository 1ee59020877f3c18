"""The results of steps on the backend "reference", by ``core.reference`` and ``speculation.reference``.

They are the bits of every other backend. Of the mode they take V, the rule and what top-p is a share of; every filter
applies in every mode. Edits and logprobs have no other definition than their stages, which run in eager torch.
"""

from __future__ import annotations

from torch import Tensor

from compiled_sampler.batch import (
    DraftTable,
    ProbabilityOutputs,
    SampleInputs,
    SampleOutputs,
    VerifyInputs,
    VerifyOutputs,
)
from compiled_sampler.core.reference import probabilities, sample
from compiled_sampler.core.rows import row_slots_of
from compiled_sampler.edits.recording import cut_at_stop, with_finished
from compiled_sampler.engine.boundary.arguments import check_not_capturing
from compiled_sampler.modes import Mode, edits_drafts
from compiled_sampler.pipeline.chunks import eagerly
from compiled_sampler.pipeline.edits import edited_logits
from compiled_sampler.pipeline.logprobs import logprobs_of
from compiled_sampler.pipeline.sample import keyed_by
from compiled_sampler.pipeline.schedule import Schedule, schedule_for
from compiled_sampler.pipeline.verify_rows import (
    edits_of_drafts,
    emitted_logprobs,
    rows_of,
    slots_of,
    verify_schedules,
    with_logprobs,
)
from compiled_sampler.speculation.reference import verify
from compiled_sampler.speculation.row_layout import gathered, rows_of_drafts


def drawn_by_definition(mode: Mode, inputs: SampleInputs) -> SampleOutputs:
    """A token for each row of logits."""
    edited = _edited(mode, inputs)
    drawn = sample(edited, vocab_size=mode.vocab_size, base_is_row=mode.base_is_row)
    if inputs.logprobs is not None:
        rows = (inputs.logits, edited.logits, row_slots_of(inputs), drawn.token_ids)
        drawn = drawn._replace(logprobs=logprobs_of(_schedule(mode, inputs), *rows, inputs.logprobs, eagerly))
    if inputs.stops is None:
        return drawn
    return with_finished(drawn, inputs.slots, inputs.stops)._replace(logprobs=drawn.logprobs)


def probabilities_by_definition(mode: Mode, inputs: SampleInputs) -> ProbabilityOutputs:
    """The distribution that ``drawn_by_definition`` draws from."""
    edited = _edited(mode, inputs)
    return probabilities(edited, vocab_size=mode.vocab_size, base_is_row=mode.base_is_row)


def verified_by_definition(mode: Mode, inputs: VerifyInputs) -> VerifyOutputs:
    """The drafts that the mode's rule accepts, and one token more."""
    _check_not_capturing(inputs.logits)
    edited = _edited_rows_and_drafts(mode, inputs)
    verified = verify(mode, edited)
    if inputs.stops is not None:
        verified = cut_at_stop(verified, inputs.slots, inputs.stops)
    if inputs.logprobs is None:
        return verified
    rows = emitted_logprobs(_schedule(mode, inputs), edited.logits, inputs, verified, eagerly)
    assert rows is not None
    return with_logprobs(verified, rows, inputs, eagerly)


def _edited(mode: Mode, inputs: SampleInputs) -> SampleInputs:
    """The inputs with edited logits, float32 ``[R, V]``, without edits, and with the positions that key their noise."""
    _check_not_capturing(inputs.logits)
    row_slots = row_slots_of(inputs)
    positions = keyed_by(row_slots, inputs.noise, eagerly).positions
    if inputs.edits is None:
        return inputs._replace(positions=positions)
    schedule = schedule_for(mode, inputs.logits.shape[0], inputs.logits.device, is_edited=True)
    logits = edited_logits(schedule, inputs.logits, row_slots, inputs.edits._replace(leave=False), eagerly)  # in a copy
    return inputs._replace(logits=logits, edits=None, positions=positions)


def _edited_rows_and_drafts(mode: Mode, inputs: VerifyInputs) -> VerifyInputs:
    """Inputs of a verification with edited logits of target and drafts, and without edits."""
    if inputs.edits is None:
        return inputs
    schedules = verify_schedules(mode, inputs)
    layout, _, edits, noise = rows_of(schedules, inputs, eagerly)
    assert edits is not None
    logits, edits = inputs.logits, edits._replace(leave=False)  # in a copy
    if not mode.from_probabilities:
        logits = edited_logits(schedules.rows, logits, slots_of(inputs.table, layout), edits, eagerly)
    proposals = inputs.proposals
    if isinstance(proposals, DraftTable):
        _, row_ids = rows_of_drafts(inputs.logits, inputs.slots, inputs.num_drafts, proposals)
        proposals = gathered(proposals, row_ids[: len(layout.trials.row_ids)])
    if isinstance(proposals, Tensor) and edits_drafts(mode) and len(proposals):
        row_slots, draft_edits = slots_of(inputs.table, layout.trials), edits_of_drafts(layout, edits)
        proposals = edited_logits(schedules.drafts, proposals[: len(row_slots.slots)], row_slots, draft_edits, eagerly)
    return inputs._replace(logits=logits, proposals=proposals, edits=None, noise=noise)


def _check_not_capturing(logits: Tensor) -> None:
    check_not_capturing(
        logits.device,
        "backend must not be 'reference' inside a capture, got a call in one: its Python loops wait for the device; "
        "Sampler(backend='compiled') draws the same tokens and can be captured after warmup()",
    )


def _schedule(mode: Mode, inputs: SampleInputs | VerifyInputs) -> Schedule:
    return schedule_for(mode, inputs.logits.shape[0], inputs.logits.device)
