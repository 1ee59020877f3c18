"""The logprobs of the tokens that a verification emits: of the rows that emit them, then by request and place."""

from __future__ import annotations

from torch import Tensor

from compiled_sampler.batch import VerifyInputs, VerifyOutputs
from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import Run
from compiled_sampler.logprobs import LogprobOutputs
from compiled_sampler.pipeline.logprobs import logprobs_of
from compiled_sampler.pipeline.scheduling.schedule import Schedule
from compiled_sampler.pipeline.verification.verify_rows import rows_like
from compiled_sampler.speculation.cached_drafts import gathered
from compiled_sampler.speculation.emitted_rows import by_request, emitted_rows


def emitted_logprobs(
    schedule: Schedule, edited: Tensor, inputs: VerifyInputs, token_ids: Tensor, run: Run
) -> LogprobOutputs | None:
    """The logprobs of each row of logits ``[R]`` for the token that it emits; None if none are asked for.

    Args:
        schedule: for the R rows.
        edited: ``[R, >=V]``, the logits after edits.
        inputs: of the step, with the logits before edits.
        token_ids: int64 ``[N, K+1]``, as emitted.
        run: how a stage is run.
    """
    if inputs.logprobs is None:
        return None
    rows = run(emitted_rows, rows_like(inputs), inputs.slots, inputs.num_drafts, token_ids)
    row_slots = RowSlots(inputs.table, rows.slots, rows.token_ids)  # positions are not used
    raw = inputs.logits
    if inputs.rows is not None:
        raw = run(gathered, raw, inputs.rows.row_ids) if inputs.logprobs.wanted.of == "raw" else edited
    return logprobs_of(schedule, raw, edited, row_slots, rows.token_ids, inputs.logprobs, run)


def with_logprobs(made: VerifyOutputs, rows: LogprobOutputs, inputs: VerifyInputs, run: Run) -> VerifyOutputs:
    """The results of a step with the logprobs of its rows ``[R, ...]`` by request and place, ``[N, K+1, ...]``.

    Where nothing is emitted, also behind a token that ends the request, they are -1 and -inf.
    """
    return made._replace(logprobs=run(by_request, rows, inputs.num_drafts, made.token_ids))
