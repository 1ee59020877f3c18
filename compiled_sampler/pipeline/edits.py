"""Edits of logits, in one place: before temperature, for sampling, drafting, probabilities and verification."""

from __future__ import annotations

from torch import Tensor

from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import Run
from compiled_sampler.pipeline.schedule import Schedule


def edited_logits(schedule: Schedule, logits: Tensor, row_slots: RowSlots, run: Run) -> Tensor:
    """The logits ``[R, >=V]`` after the schedule's edits in their order, which every later stage reads.

    Args:
        schedule: gives the edits; without edits the logits are returned unchanged.
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        row_slots: ``[R]``, the request and the position of each row.
        run: how a stage is run.
    """
    for edit in schedule.edits:
        logits = run(edit, logits, row_slots, vocab_size=schedule.mode.vocab_size)
    return logits
