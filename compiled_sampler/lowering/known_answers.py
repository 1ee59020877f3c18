"""Compiled stages compared with eager torch on known inputs, bit for bit; those that differ run in eager torch.

``warmup`` does so on a torch that ``inductor.versions`` does not know, and on any where the environment variable
``COMPILED_SAMPLER_KNOWN_ANSWERS`` is 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from compiled_sampler.edit_tables import History, HistoryRows
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.lowering.inductor.versions import is_known
from compiled_sampler.lowering.known_edits import known_record
from compiled_sampler.lowering.known_inputs import hard_inputs, rounds
from compiled_sampler.lowering.stages.bit_equality import fault
from compiled_sampler.lowering.stages.stage_call import outcome
from compiled_sampler.lowering.stages.stage_tuning import Stage
from compiled_sampler.lowering.stages.tuning import tuning_of
from compiled_sampler.modes import Mode

VARIABLE = "COMPILED_SAMPLER_KNOWN_ANSWERS"
_RECORDS = 3  # rounds


def are_wanted() -> bool:
    """Whether warm-up compares compiled stages with eager torch."""
    return not is_known() or os.environ.get(VARIABLE) == "1"


def compare(step: Callable[[Mode, Any, Any], object], mode: Mode, like: Any, stages: CompiledStages) -> None:
    """Run a step on known inputs, and every stage of it that Inductor sees both compiled and in eager torch.

    Args:
        step: called as ``step(mode, inputs, run)``.
        mode: of the step.
        like: its inputs, of the shapes that are compared.
        stages: the compiled ones; those that differ run in eager torch from now on.
    """
    for number in rounds(like):
        step(mode, hard_inputs(mode, like, number), _Comparison(stages))


def compare_record(
    stage: Stage,
    mode: Mode,
    memory: tuple[History, HistoryRows],
    given: tuple[Any, ...],
    stages: CompiledStages,
    **static: Any,
) -> None:
    """Run a stage that writes tokens into the history on known ones, as ``compare`` does; arguments as ``recorded``."""
    for number in range(_RECORDS):
        _Comparison(stages)(stage, *known_record(mode.vocab_size, memory, given, number), **static)


class _Comparison:
    """A ``run`` that compares compiled stages with eager torch, whose results it returns."""

    fuses = True  # so that stages have the rows that the compiled ones will have

    def __init__(self, stages: CompiledStages) -> None:
        self._stages = stages

    def __call__(self, stage: Any, /, *tensors: Any, **static: Any) -> Any:
        tuning, eager = tuning_of(stage), partial(stage, **static)
        if tuning.opaque:
            return eager(*tensors)
        compiled, wanted = partial(self._stages, stage, **static), outcome(eager, tensors, writes=tuning.writes)
        reason = fault(lambda: outcome(compiled, tensors, writes=tuning.writes), wanted)
        if reason:
            self._stages.run_eagerly(stage, reason)
        return eager(*tensors) if tuning.writes else wanted
