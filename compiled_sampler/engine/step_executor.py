"""A step on tensors: its inputs put together, its stages or its definition run, and what it leaves behind written.

The definition is the backend "reference", by ``core.reference`` and ``speculation.reference``: the bits of every other
backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from compiled_sampler.batch import (
    DraftTable,
    EditedOutputs,
    ProbabilityOutputs,
    RowStatus,
    SampleInputs,
    SampleOutputs,
    SlotTable,
    VerifyInputs,
    VerifyOutputs,
)
from compiled_sampler.core.reference import probabilities, sample
from compiled_sampler.core.rows import idle_status, row_slots_of
from compiled_sampler.core.stage import Run
from compiled_sampler.edits.recording import cut_at_stop, record_drafts, record_draws, record_ends, with_finished
from compiled_sampler.engine.boundary.arguments import check_not_capturing
from compiled_sampler.engine.drafts import DraftCache
from compiled_sampler.engine.requests.edit_slots import EditSlots
from compiled_sampler.engine.requests.slots import SlotState, unfiltered_table
from compiled_sampler.engine.requests.uploads import LogprobTables
from compiled_sampler.engine.step import Step
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import CACHE, Mode, edits_drafts
from compiled_sampler.pipeline.chunks import eagerly
from compiled_sampler.pipeline.edits import edited_logits, edited_step, step_run
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.pipeline.logprobs import logprobs_of
from compiled_sampler.pipeline.sample import Draw, best_step, edit_and_draw, keyed_by, sample_step
from compiled_sampler.pipeline.schedule import StepRun, is_gpu, schedule_for
from compiled_sampler.pipeline.sharded import drawing_in
from compiled_sampler.pipeline.verify import verify_step
from compiled_sampler.pipeline.verify_rows import (
    edits_of_drafts,
    emitted_logprobs,
    rows_of,
    slots_of,
    verify_run,
    with_logprobs,
)
from compiled_sampler.shard import VocabularyShard
from compiled_sampler.speculation.reference import verify
from compiled_sampler.speculation.row_layout import gathered, rows_of_drafts
from graph_cache import copy_tensors

Inputs = TypeVar("Inputs", bound=SampleInputs | VerifyInputs)
_INTEGERS = (
    "slots",
    "positions",
    "draw_index",
    "num_drafts",
    "draft_token_ids",
    "parents",
)  # of a step, which may be int32 or int64


class StepExecutor:
    """Executes steps on tensors, eager or compiled, also while a graph is captured."""

    def __init__(
        self,
        is_definition: bool,
        requests: SlotState,
        stages: CompiledStages | None,
        drafts: DraftCache | None,
        edits: EditSlots,
        logprobs: LogprobTables,
        vocab_size: int,
        shard: VocabularyShard | None,  # of the columns that logits and proposals have
    ) -> None:
        self._is_definition, self._requests, self._shard = is_definition, requests, shard
        self._run: Run = eagerly if stages is None else stages
        self._drafts, self._edits, self._logprobs = drafts, edits, logprobs
        with torch.inference_mode(False):
            self._unfiltered = unfiltered_table(requests.table, vocab_size)

    def table_of(self, step: Step) -> SlotTable:
        """The parameters by slot, with what the step does not serve; to be asked for before a capture of the step."""
        return self._requests.table_for(step.mode.samples_as, step.edits)

    def __call__(
        self, step: Step, *, logits: Tensor, slots: Tensor, positions: Tensor, offsets: Tensor | None = None,
        draw_index: Tensor | None = None, num_drafts: Tensor | None = None, draft_token_ids: Tensor | None = None,
        proposals: Tensor | None = None, parents: Tensor | None = None,
        **edit_tensors: Tensor,
    ) -> Any:  # fmt: skip
        """The results of a step; arguments as the fields of ``SampleInputs`` and ``VerifyInputs``, or of the edits."""
        logits = self._rows_for(step, logits)
        proposals = None if proposals is None else self._rows_for(step, proposals)
        table, edits, stops, noise, logprobs = self.table_of(step), None, None, None, None
        if step.edits:
            noise = self._edits.noise(step.edits)
            if step.has_tokens:
                stops = self._edits.stops
            if not step.mode.from_probabilities:
                edit_inputs = {name: tensor.detach() for name, tensor in edit_tensors.items()}
                edits = self._edits.inputs(step.edits, edit_inputs, self._logprobs.processed_scale)
        if step.logprobs is not None:
            logprobs = self._logprobs.inputs(step.logprobs, logits.shape[0])
        rows: dict[str, Any] = {"logits": logits, "slots": slots, "positions": positions, "table": table}
        rows |= {"edits": edits, "logprobs": logprobs, "noise": noise}
        if num_drafts is not None and draft_token_ids is not None:
            cached = self._drafts.table if step.mode.drafts == CACHE and self._drafts is not None else proposals
            drafts: dict[str, Any] = {"num_drafts": num_drafts, "draft_token_ids": draft_token_ids, "parents": parents}
            verified = VerifyInputs(**rows, **drafts, proposals=cached, stops=stops, draft_table=self._unfiltered)
            return self._verified(step, in_int64(verified))
        ends = None if step.records else stops  # what records the tokens finds which of them are ends, too
        inputs = in_int64(SampleInputs(**rows, offsets=offsets, stops=ends, draw_index=draw_index))
        if step.kind == "best":
            return best_step(step.mode, inputs, step.num_best, self._run)
        return self._drawn(step, inputs) if step.has_tokens else self._rows_of(step, inputs)

    def _rows_for(self, step: Step, rows: Tensor) -> Tensor:
        """Logits, proposals as stages take them: without gradients, whole if a step needs it, laid out as compiled."""
        rows = rows.detach()
        if self._shard is not None and not self._takes_columns(step):
            rows = self._shard.whole_rows(rows, step.mode.vocab_size, self._run)
        return self._run.steady_rows(rows)

    def _takes_columns(self, step: Step) -> bool:
        """Whether a step draws from the columns of a shard; others take whole rows."""
        is_kept = step.kind == "sample" and step.has_own_noise and self._drafts is not None  # its rows, in the cache
        if self._is_definition or step.mode.from_probabilities or is_kept:
            return False
        return step.kind == "sample" or (step.kind == "verify" and step.mode.matches_drafts)

    def _draw_of(self, step: Step) -> Draw:
        return edit_and_draw if self._shard is None or not self._takes_columns(step) else drawing_in(self._shard)

    def _drawn(self, step: Step, inputs: SampleInputs) -> SampleOutputs:
        """A token for each row, which is then in the history, and the logits of an uncoupled draft in the cache."""
        if self._is_definition:
            drawn = drawn_by_definition(step.mode, inputs)
        else:
            drawn = sample_step(step.mode, inputs, self._run, self._draw_of(step))
        if step.records:
            is_fused = self._run.fuses and is_gpu(drawn.token_ids.device)
            # elsewhere each place would be written to memory
            places = self._edits.history.table.entries.shape[2] if is_fused else 0
            rows = inputs.slots, inputs.positions, drawn.token_ids, drawn.status
            ends = self._record(record_draws, *rows, self._edits.stops, num_places=places)
            drawn = drawn._replace(status=ends.status, finished=ends.finished)
        if self._drafts is not None and inputs.offsets is not None:
            self._drafts.write(inputs.logits, inputs.slots, inputs.offsets, self._run)
        return drawn

    def _rows_of(self, step: Step, inputs: SampleInputs) -> Any:
        """Probabilities, or edited logits; of a shard its own columns."""
        results: ProbabilityOutputs | EditedOutputs
        if step.kind == "edited_logits":
            results = edited_step(step.mode, inputs, self._run)
            is_uncovered = idle_status(inputs.table, inputs.slots) == int(RowStatus.NOT_COVERED)
            results.logits.masked_fill_(is_uncovered[:, None], -math.inf)
        elif self._is_definition:
            edited = _edited(step.mode, inputs)
            results = probabilities(edited, vocab_size=step.mode.vocab_size, base_is_row=step.mode.base_is_row)
        else:
            results = probability_step(step.mode, inputs, self._run)
        if self._shard is None:
            return results
        (rows,) = results
        return type(results)(self._shard.own(rows, step.mode.vocab_size).contiguous())

    def _verified(self, step: Step, inputs: VerifyInputs) -> VerifyOutputs:
        """The results of a verification, whose drafts are in the history before, and its last tokens afterwards."""
        requests, width = (inputs.slots, inputs.positions), inputs.draft_token_ids.shape[1]
        if step.records and width and not step.of_trees:  # rows of trees have texts of their own
            drafts = *requests, inputs.draft_token_ids, inputs.num_drafts, inputs.table
            self._record(record_drafts, *drafts, vocab_size=step.mode.vocab_size)
        if self._is_definition:
            verified = verified_by_definition(step.mode, inputs)
        else:
            verified = verify_step(step.mode, inputs, self._run, self._draw_of(step))
        if not step.records:
            return verified
        ends = *requests, verified.token_ids, inputs.num_drafts, verified.status
        return verified._replace(status=self._record(record_ends, *ends))

    def _record(self, stage: Callable[..., Any], *rows: Any, **static: Any) -> Any:
        """Write tokens of each row into the history, and return what the stage tells of the rows."""
        return self._run(stage, *self._edits.history.memory, *rows, **static)


def in_int64(inputs: Inputs) -> Inputs:
    """Inputs of a step with slots, positions, counts and drafts in int64, so that no stage is compiled for int32."""
    narrow: dict[str, Tensor] = {}
    for name in _INTEGERS:
        tensor = getattr(inputs, name, None)
        if tensor is not None and tensor.dtype is not torch.int64:
            narrow[name] = tensor
    if not narrow:
        return inputs
    wide = {name: torch.empty(tensor.shape, dtype=torch.int64, device=tensor.device) for name, tensor in narrow.items()}
    # one launch for all; inside a capture it is part of the graph
    copy_tensors([*wide.values()], [*narrow.values()])
    replaced: Any = inputs
    return replaced._replace(**wide)  # type: ignore[no-any-return]


# The backend "reference". Of the mode it takes V, the rule and what top-p is a share of; every filter applies in every
# mode. Edits and logprobs have no other definition than their stages, which run in eager torch.
def drawn_by_definition(mode: Mode, inputs: SampleInputs) -> SampleOutputs:
    """A token for each row of logits."""
    edited = _edited(mode, inputs)
    drawn = sample(edited, vocab_size=mode.vocab_size, base_is_row=mode.base_is_row)
    if inputs.logprobs is not None:
        rows = (inputs.logits, edited.logits, row_slots_of(inputs), drawn.token_ids)
        drawn = drawn._replace(logprobs=logprobs_of(_run_of(mode, inputs), *rows, inputs.logprobs))
    if inputs.stops is None:
        return drawn
    return with_finished(drawn, inputs.slots, inputs.stops)._replace(logprobs=drawn.logprobs)


def verified_by_definition(mode: Mode, inputs: VerifyInputs) -> VerifyOutputs:
    """The drafts that the mode's rule accepts, and one token more."""
    _check_not_capturing(inputs.logits)
    edited = _edited_rows_and_drafts(mode, inputs)
    verified = verify(mode, edited)
    if inputs.stops is not None:
        verified = cut_at_stop(verified, inputs.slots, inputs.stops)
    if inputs.logprobs is None:
        return verified
    rows = emitted_logprobs(_run_of(mode, inputs), edited.logits, inputs, verified)
    assert rows is not None
    return with_logprobs(verified, rows, inputs, eagerly)


def _edited(mode: Mode, inputs: SampleInputs) -> SampleInputs:
    """The inputs with edited logits, float32 ``[R, V]``, without edits, and with the positions that key their noise."""
    _check_not_capturing(inputs.logits)
    row_slots = row_slots_of(inputs)
    positions = keyed_by(row_slots, inputs.noise, eagerly).positions
    if inputs.edits is None:
        return inputs._replace(positions=positions)
    run, in_a_copy = step_run(mode, inputs, eagerly), inputs.edits._replace(leave=False)
    logits = edited_logits(run, inputs.logits, row_slots, in_a_copy)
    return inputs._replace(logits=logits, edits=None, positions=positions)


def _edited_rows_and_drafts(mode: Mode, inputs: VerifyInputs) -> VerifyInputs:
    """Inputs of a verification with edited logits of target and drafts, and without edits."""
    if inputs.edits is None:
        return inputs
    run = verify_run(mode, inputs, eagerly)
    layout, _, edits, noise = rows_of(run, inputs)
    assert edits is not None
    logits, edits = inputs.logits, edits._replace(leave=False)  # in a copy
    if not mode.from_probabilities:
        logits = edited_logits(run.rows, logits, slots_of(inputs.table, layout), edits)
    proposals = inputs.proposals
    if isinstance(proposals, DraftTable):
        _, row_ids = rows_of_drafts(inputs.logits, inputs.slots, inputs.num_drafts, proposals)
        proposals = gathered(proposals, row_ids[: len(layout.trials.row_ids)])
    if isinstance(proposals, Tensor) and edits_drafts(mode) and len(proposals):
        row_slots, draft_edits = slots_of(inputs.table, layout.trials), edits_of_drafts(layout, edits)
        proposals = edited_logits(run.drafts, proposals[: len(row_slots.slots)], row_slots, draft_edits)
    return inputs._replace(logits=logits, proposals=proposals, edits=None, noise=noise)


def _check_not_capturing(logits: Tensor) -> None:
    check_not_capturing(
        logits.device,
        "backend must not be 'reference' inside a capture, got a call in one: its Python loops wait for the device; "
        "Sampler(backend='compiled') draws the same tokens and can be captured after warmup()",
    )


def _run_of(mode: Mode, inputs: SampleInputs | VerifyInputs) -> StepRun:
    return StepRun(eagerly, schedule_for(mode, inputs.logits.shape[0], inputs.logits.device))
