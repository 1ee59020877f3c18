"""The steps of the pipeline with compiled stages, or in eager torch where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor

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
from compiled_sampler.logprobs import mapped
from compiled_sampler.lowering import known_answers
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import Mode
from compiled_sampler.pipeline.edits import edited_step
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.verification.verify import verify_step
from compiled_sampler.speculation.row_layout import with_padding

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
    return _run(verify_step if stages is None else _verify_several, mode, inputs, stages)


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


def _verify_several(mode: Mode, inputs: VerifyInputs, run: Run) -> VerifyOutputs:
    """``pipeline.verify_step`` of two requests and two rows at least.

    A single request gets another of padding, and single rows too, so that all stages are compiled for several alone:
    a third of the kernels.
    """
    single, edits, logprobs = inputs.slots.shape[0] == 1, inputs.edits, inputs.logprobs
    if single:
        requests = inputs.slots, inputs.positions, inputs.num_drafts, inputs.draft_token_ids
        slots, positions, num_drafts, drafts = run(with_padding, *requests)
        inputs = inputs._replace(slots=slots, positions=positions, num_drafts=num_drafts, draft_token_ids=drafts)
    if isinstance(inputs.proposals, Tensor):
        inputs = inputs._replace(proposals=_two_rows(inputs.proposals))
    if edits is not None:
        mask = None if edits.token_bitmask is None else _two_rows(edits.token_bitmask)
        given = tuple(map(_two_rows, edits.given))
        inputs = inputs._replace(edits=edits._replace(token_bitmask=mask, given=given))
    if logprobs is not None and logprobs.given_ids is not None:
        inputs = inputs._replace(logprobs=logprobs._replace(given_ids=_two_rows(logprobs.given_ids)))
    made = verify_step(mode, inputs._replace(logits=_two_rows(inputs.logits)), run)
    return _first_request(made) if single else made


def _first_request(made: VerifyOutputs) -> VerifyOutputs:
    """The results of the first request alone."""
    outputs = {name: each[:1] for name, each in made._asdict().items() if isinstance(each, Tensor)}
    found = made.logprobs
    return VerifyOutputs(**outputs, logprobs=None if found is None else mapped(found, lambda each: each[:1]))


def _two_rows(values: Tensor) -> Tensor:
    """At least two rows, the new ones 0."""
    if values.shape[0] > 1:
        return values
    return F.pad(values, (*(0, 0) * (values.dim() - 1), 0, 2 - values.shape[0]))
