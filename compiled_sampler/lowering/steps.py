"""The steps of the pipeline with compiled stages, or in eager torch where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from compiled_sampler.batch import (
    EditedOutputs,
    ProbabilityOutputs,
    SampleInputs,
    SampleOutputs,
    VerifyInputs,
    VerifyOutputs,
)
from compiled_sampler.core.stage import Run, call
from compiled_sampler.edit_tables import History, HistoryRows
from compiled_sampler.lowering import known_answers
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import Mode
from compiled_sampler.pipeline.edits import edited_step
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.verification.verify import verify_step

Inputs = TypeVar("Inputs", SampleInputs, VerifyInputs)
Outputs = TypeVar("Outputs")
Result = TypeVar("Result")


def sampling_step(mode: Mode, inputs: SampleInputs, stages: CompiledStages | None) -> SampleOutputs:
    """Tokens of ``pipeline.sample_step``; ``stages`` runs its stages, None in eager torch."""
    return _run(sample_step, mode, inputs, stages)


def probabilities_step(mode: Mode, inputs: SampleInputs, stages: CompiledStages | None) -> ProbabilityOutputs:
    """Distributions of ``pipeline.probability_step``; arguments as ``sampling_step``."""
    return _run(probability_step, mode, inputs, stages)


def edited_logits_step(mode: Mode, inputs: SampleInputs, stages: CompiledStages | None) -> EditedOutputs:
    """Logits of ``pipeline.edited_step``; arguments as ``sampling_step``."""
    return _run(edited_step, mode, inputs, stages)


def verification_step(mode: Mode, inputs: VerifyInputs, stages: CompiledStages | None) -> VerifyOutputs:
    """Tokens and counts of ``pipeline.verify_step``; arguments as ``sampling_step``."""
    return _run(verify_step, mode, inputs, stages)


def recorded(
    stage: Callable[..., Result],
    mode: Mode,
    memory: tuple[History, HistoryRows],
    given: tuple[Any, ...],
    stages: CompiledStages | None,
    **static: Any,
) -> Result:
    """The result of a stage that writes tokens into the history; while stages are checked, it writes known ones first.

    Args:
        stage: one of ``edits/written.py``.
        mode: gives V.
        memory: the history, and the same in rows.
        given: what else the stage gets.
        stages: as ``sampling_step``.
        static: its keyword arguments.
    """
    if stages is None:
        return call(stage, *memory, *given, **static)
    if stages.checks_known_answers:
        known_answers.compare_record(stage, mode, memory, given, stages, **static)
    run: Run = stages
    return run(stage, *memory, *given, **static)


def _run(
    step: Callable[[Mode, Inputs, Run], Outputs], mode: Mode, inputs: Inputs, stages: CompiledStages | None
) -> Outputs:
    """The results of a step; while stages are checked, it runs on known inputs first."""
    if stages is None:
        return step(mode, inputs, call)
    if stages.checks_known_answers:
        known_answers.compare(step, mode, inputs, stages)
    return step(mode, inputs, stages)
