"""A step on tensors: its inputs put together, its stages run, and what it leaves behind written in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.batch import RowStatus, SampleInputs, SampleOutputs, SlotTable, VerifyInputs, VerifyOutputs
from compiled_sampler.core.row_table import unfiltered_table
from compiled_sampler.core.rows import idle_status
from compiled_sampler.core.stage import Run, call, fuses
from compiled_sampler.edits.written import record_drafts, record_draws, record_ends
from compiled_sampler.engine.drafts.draft_cache import DraftCache
from compiled_sampler.engine.integers import in_int64
from compiled_sampler.engine.requests.edit_slots import EditSlots
from compiled_sampler.engine.requests.logprob_tables import LogprobTables
from compiled_sampler.engine.requests.slots import unserved_needs
from compiled_sampler.engine.requests.uploads import StagedTable
from compiled_sampler.engine.steps.definition import by_definition
from compiled_sampler.engine.steps.step import Step
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import CACHE, Mode
from compiled_sampler.pipeline.edits import edited_step
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.schedule import is_gpu
from compiled_sampler.pipeline.verify import verify_step


class StepCall:
    """Calls steps on tensors, eager or compiled, also while a graph is captured.

    Args:
        is_definition: whether steps run by their definition, the backend "reference".
        staged: parameters by slot.
        stages: the compiled stages; None to run them in eager torch.
        drafts: the draft cache; None without one.
        edits: of the requests by slot.
        logprobs: what logprobs read.
        modes: the mode table.
    """

    def __init__(
        self,
        is_definition: bool,
        staged: StagedTable,
        stages: CompiledStages | None,
        drafts: DraftCache | None,
        edits: EditSlots,
        logprobs: LogprobTables,
        modes: Sequence[Mode],
    ) -> None:
        """Run nothing."""
        self._is_definition, self._staged, self._stages = is_definition, staged, stages
        self._drafts, self._edits, self._logprobs = drafts, edits, logprobs
        self._modes, self._tables = modes, dict[tuple[str, tuple[str, ...]], SlotTable]()
        with torch.inference_mode(False):
            self._unfiltered = unfiltered_table(staged.table, modes[0].vocab_size)

    @property
    def table_sizes(self) -> tuple[Any, ...]:
        """What stages are compiled for of the tables; its ``repr`` is the same in every process."""
        drafts = None if self._drafts is None else self._drafts.table.logits.shape
        return self._staged.table.seeds.shape, self._edits.sizes, drafts

    def table_of(self, step: Step) -> SlotTable:
        """The parameters by slot, with what the step does not serve; to be asked for before a capture of the step."""
        key = step.mode.samples_as, step.edits
        if key not in self._tables:
            self._tables[key] = self._staged.serving(unserved_needs(self._modes, *key, self._edits.custom.all_names))
        return self._tables[key]

    @property
    def _run(self) -> Run:
        return call if self._stages is None else self._stages

    def __call__(
        self, step: Step, *, logits: Tensor, slots: Tensor, positions: Tensor, offsets: Tensor | None = None,
        num_drafts: Tensor | None = None, draft_token_ids: Tensor | None = None, proposals: Tensor | None = None,
        **given: Tensor,
    ) -> Any:  # fmt: skip
        """The results of a step; arguments as the fields of ``SampleInputs`` and ``VerifyInputs``, or of the edits."""
        scale, table = self._logprobs.processed_scale, self.table_of(step)
        edits = None if step.mode.from_probabilities else self._edits.inputs(step.edits, given, scale)
        stops = self._edits.stops if step.edits and step.has_tokens else None
        logprobs, noise = self._logprobs.inputs(step.logprobs, logits.shape[0]), self._edits.noise(step.edits)
        if num_drafts is not None and draft_token_ids is not None:
            kept = self._drafts.table if step.mode.drafts == CACHE and self._drafts is not None else proposals
            read = (logits, slots, positions, num_drafts, draft_token_ids, kept, table)
            verified = VerifyInputs(*read, edits, stops, logprobs, noise, self._unfiltered)
            return self._verified(step, in_int64(verified))
        ends = None if step.records else stops  # what records the tokens finds which of them are ends, too
        inputs = in_int64(SampleInputs(logits, slots, positions, table, offsets, edits, ends, logprobs, noise))
        if not step.has_tokens:
            return self._computed(step, inputs)
        drawn = self._sampled(step, inputs)
        if self._drafts is not None and inputs.offsets is not None:
            self._drafts.write(logits, inputs.slots, inputs.offsets, self._run)
        return drawn

    def _sampled(self, step: Step, inputs: SampleInputs) -> SampleOutputs:
        """The draws of a step, which it writes into the history if it has one."""
        drawn: SampleOutputs = self._computed(step, inputs)
        if not step.records:
            return drawn
        memory, is_fused = self._edits.history.memory, fuses(self._run) and is_gpu(drawn.token_ids.device)
        places = memory[0].entries.shape[2] if is_fused else 0  # elsewhere each place would be written to memory
        given = inputs.slots, inputs.positions, drawn.token_ids, drawn.status, self._edits.stops
        ends = self._run(record_draws, *memory, *given, num_places=places)
        return drawn._replace(status=ends.status, finished=ends.finished)

    def _verified(self, step: Step, inputs: VerifyInputs) -> VerifyOutputs:
        """The results of a verification, whose drafts are in the history before, and its last tokens afterwards."""
        if not step.records:
            made: VerifyOutputs = self._computed(step, inputs)
            return made
        memory, requests = self._edits.history.memory, (inputs.slots, inputs.positions)
        if inputs.draft_token_ids.shape[1]:
            drafts = *requests, inputs.draft_token_ids, inputs.num_drafts, inputs.table
            self._run(record_drafts, *memory, *drafts, vocab_size=step.mode.vocab_size)
        made = self._computed(step, inputs)
        ends = *requests, made.token_ids, inputs.num_drafts, made.status
        status = self._run(record_ends, *memory, *ends)
        return made._replace(status=status)

    def _computed(self, step: Step, inputs: SampleInputs | VerifyInputs) -> Any:
        if isinstance(inputs, SampleInputs) and step.kind == "edited_logits":
            edited = edited_step(step.mode, inputs, self._run)
            is_uncovered = idle_status(inputs.table, inputs.slots) == int(RowStatus.NOT_COVERED)
            edited.logits.masked_fill_(is_uncovered[:, None], -math.inf)
            return edited
        if self._is_definition:
            return by_definition(step.kind, step.mode, inputs)
        if isinstance(inputs, VerifyInputs):
            return verify_step(step.mode, inputs, self._run)
        compute = probability_step if step.kind == "probabilities" else sample_step
        return compute(step.mode, inputs, self._run)
