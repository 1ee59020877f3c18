"""The backend "reference": a step by its definition, ``core.reference`` and ``speculation.reference``.

Logprobs have no other definition than their stages, which run in eager torch on the tokens of the definition.
"""

from __future__ import annotations

from typing import Any

from compiled_sampler.batch import SampleInputs, VerifyInputs, VerifyOutputs
from compiled_sampler.core.reference import probabilities, sample
from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import call
from compiled_sampler.edits.stops import cut_at_stop, with_finished
from compiled_sampler.edits.watermark import noise_positions
from compiled_sampler.engine.boundary.capture import check_not_capturing
from compiled_sampler.modes import Mode
from compiled_sampler.pipeline.logprobs import logprobs_of
from compiled_sampler.pipeline.schedule import Schedule, schedule_for
from compiled_sampler.pipeline.verify_rows import edited_inputs, edited_verify_inputs, emitted_logprobs, with_logprobs
from compiled_sampler.speculation.reference import verify


def by_definition(kind: str, mode: Mode, inputs: SampleInputs | VerifyInputs) -> Any:
    """The results of a step, bit for bit those of every other backend.

    Args:
        kind: "sample", "draft", "probabilities" or "verify".
        mode: gives V, the rule and what top-p is a share of; the definition applies every filter in every mode.
        inputs: of the step.

    Raises:
        RuntimeError: the current stream is being captured.
    """
    check_not_capturing(
        inputs.logits.device,
        "backend must not be 'reference' inside a capture, got a call in one: its Python loops wait for the device; "
        "Sampler(backend='compiled') draws the same tokens and can be captured after warmup()",
    )
    if isinstance(inputs, VerifyInputs):
        return _verified(mode, inputs)
    edited = edited_inputs(mode, inputs)
    if inputs.noise is not None and inputs.offsets is None:
        edited = edited._replace(positions=noise_positions(inputs.slots, inputs.positions, *inputs.noise))
    if kind == "probabilities":
        return probabilities(edited, vocab_size=mode.vocab_size, base_is_row=mode.base_is_row)
    drawn = sample(edited, vocab_size=mode.vocab_size, base_is_row=mode.base_is_row)
    if inputs.logprobs is not None:
        schedule, row_slots = _schedule(mode, inputs), RowSlots(inputs.table, inputs.slots, inputs.positions)
        rows = (inputs.logits, edited.logits, row_slots, drawn.token_ids)
        drawn = drawn._replace(logprobs=logprobs_of(schedule, *rows, inputs.logprobs, call))
    if inputs.stops is None:
        return drawn
    return with_finished(drawn, inputs.slots, inputs.stops)._replace(logprobs=drawn.logprobs)


def _verified(mode: Mode, inputs: VerifyInputs) -> VerifyOutputs:
    """The results of a verification."""
    edited = edited_verify_inputs(mode, inputs)
    made = verify(mode, edited)
    if inputs.stops is not None:
        made = cut_at_stop(made, inputs.slots, inputs.stops)
    if inputs.logprobs is None:
        return made
    rows = emitted_logprobs(_schedule(mode, inputs), edited.logits, inputs, made.token_ids, call)
    assert rows is not None
    return with_logprobs(made, rows, inputs, call)


def _schedule(mode: Mode, inputs: SampleInputs | VerifyInputs) -> Schedule:
    return schedule_for(mode, inputs.logits.shape[0], inputs.logits.device)
