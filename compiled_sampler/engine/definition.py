"""The backend "reference": a step by its definition, ``core.reference`` and ``speculation.reference``."""

from __future__ import annotations

from typing import Any

from compiled_sampler.batch import SampleInputs, VerifyInputs
from compiled_sampler.core.reference import probabilities, sample
from compiled_sampler.edits.stops import cut_at_stop, with_finished
from compiled_sampler.engine.boundary.capture import check_not_capturing
from compiled_sampler.modes import Mode
from compiled_sampler.pipeline.edited_inputs import edited_inputs, edited_verify_inputs
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
        made = verify(mode, edited_verify_inputs(mode, inputs))
        return made if inputs.stops is None else cut_at_stop(made, inputs.slots, inputs.stops)
    edited = edited_inputs(mode, inputs)
    if kind == "probabilities":
        return probabilities(edited, vocab_size=mode.vocab_size, base_is_row=mode.base_is_row)
    drawn = sample(edited, vocab_size=mode.vocab_size, base_is_row=mode.base_is_row)
    return drawn if inputs.stops is None else with_finished(drawn, inputs.slots, inputs.stops)
