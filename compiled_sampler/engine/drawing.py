"""Runs of the steps that draw one token a row, draw drafts, or compute what is drawn from: laws and edited logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.batch import EditedOutputs, ProbabilityOutputs, SampleOutputs
from compiled_sampler.edit_names import Leave
from compiled_sampler.engine.boundary.arguments import check_logprobs, checked_offset
from compiled_sampler.engine.boundary.outputs import check_outputs, empty_outputs
from compiled_sampler.engine.boundary.tensors import (
    RowFormat,
    check_consumes,
    check_logits,
    check_positions,
)
from compiled_sampler.engine.drafts.draft_cache import DraftCache
from compiled_sampler.engine.drafts.draft_handles import Draft, in_sampler_dtype
from compiled_sampler.engine.plans.plan import Plan
from compiled_sampler.engine.plans.plan_checks import check_has_boundary, check_has_drafts, check_has_positions
from compiled_sampler.engine.steps.call_tensors import CallReader, CallTensors, OfEdits, edits_of
from compiled_sampler.engine.steps.known_calls import MOST_CALLS, KnownCalls
from compiled_sampler.engine.steps.result_ring import ResultRings, Ring, is_ring
from compiled_sampler.engine.steps.step import Step
from compiled_sampler.engine.steps.step_runner import PreparedStep, StepRunner
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.modes import MOST_DRAFTS
from compiled_sampler.speculation.row_layout import entries_of_rows

_MOST_OFFSETS = 8  # of a block whose drafts of each kind are all known calls; longer blocks know fewer kinds


class Drawer:
    """Draws tokens on the backend of a runner; plans must be current, every other argument is checked here.

    Args:
        runner: runs the steps.
        logits: the format of the sampler's logits.
        cache: the draft cache, which the runner writes; None without one.
    """

    def __init__(self, runner: StepRunner, logits: RowFormat, cache: DraftCache | None = None) -> None:
        """Put every offset of a draft on the device, once for each row of the largest batch that is captured."""
        self._runner, self._logits, self._cache = runner, logits, cache
        self._calls = CallReader(runner.custom, logits.vocab_size, logits.device)
        self._known: KnownCalls[PreparedStep] = KnownCalls()
        self._known_drafts: KnownCalls[PreparedStep] = KnownCalls(_MOST_OFFSETS * MOST_CALLS)
        self._rings = ResultRings(logits.device)
        rows = runner.largest_bucket
        with torch.inference_mode(False):  # an even number of each, so that all begin at a multiple of 16 bytes
            self._offsets = torch.arange(MOST_DRAFTS, device=logits.device)[:, None].repeat(1, rows + rows % 2)

    def sample(
        self,
        plan: Plan,
        logits: Tensor,
        positions: Tensor,
        out: SampleOutputs | Ring | None,
        of_edits: OfEdits,
        options: tuple[Leave, Logprobs | None, bool],
    ) -> SampleOutputs:
        """One token for every row of the plan; see ``Sampler.sample``.

        The options are ``consume_logits``, ``logprobs`` and whether the current stream is being captured.
        """
        consumes, logprobs, is_captured = options
        rows, given = len(plan.slots), self._calls.read(plan, *of_edits)
        if consumes is not False:
            check_logits(logits, rows, self._logits)
            check_consumes(consumes, logits, *given.values(), *self._calls.states)
        edits = plan.edits if not given and consumes is False else edits_of(plan, given, consumes, logprobs)
        read = (logits, positions, *given.values(), *((plan.slot_ids,) if plan.replaced else ()))
        of_plan = plan.mode.name, rows, plan.num_drafts is None, plan.replaced
        new, call = self._known.find((*of_plan, edits, logprobs, self._runner.generation, is_captured), read, out)
        tensors = {"logits": logits, "positions": positions, **given}
        if call is None:
            prepare = partial(self._prepared_sample, edits=edits, logprobs=logprobs)
            form = SampleOutputs, 0, {"stops": bool(edits), "logprobs": logprobs}
            call = self._rings.prepared(prepare, (plan, tensors, out), is_captured, lambda: form)
            self._known.put(new, call)
        drawn: SampleOutputs = call(plan, tensors, out)
        return drawn

    def _prepared_sample(
        self,
        plan: Plan,
        tensors: dict[str, Tensor],
        out: Any,
        edits: tuple[str, ...],
        logprobs: Logprobs | None,
    ) -> PreparedStep:
        """A call of the step for arguments like these, which are checked."""
        rows, device = len(plan.slots), self._logits.device
        given = {name: each for name, each in tensors.items() if name not in ("logits", "positions")}
        check_has_drafts(plan, False)
        check_logits(tensors["logits"], rows, self._logits)
        check_positions(tensors["positions"], rows, device)
        self._calls.check(plan, given, rows)
        check_logprobs(logprobs, self._logits.vocab_size)
        check_has_boundary(edits, logprobs)
        fields: Any = {"stops": bool(edits), "logprobs": logprobs}
        if out is not None:
            inputs = (*tensors.values(), *plan.device_tensors, *self._calls.states)
            check_outputs(out, SampleOutputs, rows, 0, device, inputs, **fields)
        if not rows:
            empty = partial(empty_outputs, SampleOutputs, 0, device, **fields)
            return lambda plan, tensors, out: empty() if out is None or is_ring(out) else out
        return self._runner.prepared(Step("sample", plan.mode, edits=edits, logprobs=logprobs), plan, tensors, out)

    def draft(
        self,
        plan: Plan,
        draft_logits: Tensor,
        positions: Tensor,
        coupled: bool,
        offset: int,
        of_edits: OfEdits,
        is_captured: bool,
    ) -> Draft:
        """The handle of one draft for every request; see ``Sampler.draft``."""
        count, given = len(plan.slots), self._calls.read(plan, *of_edits)
        offset = checked_offset(offset, coupled)
        tensors = {"logits": in_sampler_dtype(draft_logits, self._logits.dtype), "positions": positions, **given}
        if not coupled:
            tensors["offsets"] = self._offsets_of(offset, count)
        edits = edits_of(plan, given)
        of_plan = plan.mode.name, count, plan.constant, plan.replaced
        read = (*tensors.values(), *((plan.slot_ids,) if "slot_ids" in plan.replaced else ()))
        new, call = self._known_drafts.find(
            (*of_plan, coupled, edits, self._runner.generation, is_captured), read, None
        )
        if call is None:
            call = self._prepared_draft(plan, tensors, given, edits)
            self._known_drafts.put(new, call)
        number = 0 if coupled or self._cache is None else self._cache.claim(plan, offset)
        drawn: SampleOutputs = call(plan, tensors, None)
        is_held = not coupled and not number
        law = draft_logits[:, : self._logits.vocab_size].detach().clone() if is_held else None
        return Draft(drawn, law, plan, offset, number)

    def _prepared_draft(
        self, plan: Plan, tensors: dict[str, Tensor], given: CallTensors, edits: tuple[str, ...]
    ) -> PreparedStep:
        """A call of the step that drafts with arguments like these, which are checked; uncoupled ones have offsets."""
        count, device = len(plan.slots), self._logits.device
        check_logits(tensors["logits"], count, self._logits, "draft_logits")
        check_positions(tensors["positions"], count, device)
        self._calls.check(plan, given, count)
        if not count:
            return lambda plan, tensors, out: empty_outputs(SampleOutputs, 0, device)
        step = Step("draft" if "offsets" in tensors else "sample", plan.mode, edits=edits)
        return self._runner.prepared(step, plan, tensors, None)

    def _offsets_of(self, offset: int, count: int) -> Tensor:
        """The offset ``count`` times, int64; in a batch that may be captured at one address, where variants read it."""
        kept = self._offsets[offset]
        return kept[:count] if count <= len(kept) else kept[:1].repeat(count)

    def probs(
        self, plan: Plan, logits: Tensor, out: Tensor | None, positions: Tensor | None, of_edits: OfEdits
    ) -> Tensor:
        """The distribution of every row of the plan, float32 ``[R, V]``; see ``Sampler.probs``."""
        vocab_size, _, device = self._logits
        rows = plan.num_rows
        given = self._calls.read(plan, *of_edits)
        self._check_rows(plan, logits, positions, given)
        results = None if out is None else ProbabilityOutputs(out)
        if results is not None:
            of_plan = *plan.device_tensors, *self._calls.states
            read = (logits, *given.values(), *of_plan, *(() if positions is None else (positions,)))
            check_outputs(results, ProbabilityOutputs, rows, vocab_size, device, read)
        if not rows:
            return empty_outputs(ProbabilityOutputs, vocab_size, device).probabilities if out is None else out
        tensors = _inputs_of_rows(plan, logits, positions, given)
        step = Step("probabilities", plan.mode, edits=edits_of(plan, given))
        made: ProbabilityOutputs = self._runner.run(step, plan, tensors, results)
        return made.probabilities

    def edited_logits(self, plan: Plan, logits: Tensor, positions: Tensor, of_edits: OfEdits) -> Tensor:
        """The logits of every row of the plan after its edits, float32 ``[R, V]``; see ``Sampler.edited_logits``."""
        vocab_size, _, device = self._logits
        given = self._calls.read(plan, *of_edits)
        self._check_rows(plan, logits, positions, given)
        if not plan.num_rows:
            return torch.empty(0, vocab_size, device=device)
        tensors = _inputs_of_rows(plan, logits, positions, given)
        step = Step("edited_logits", plan.mode, edits=edits_of(plan, given))
        made: EditedOutputs = self._runner.run(step, plan, tensors)
        return made.logits

    def _check_rows(self, plan: Plan, logits: Tensor, positions: Tensor | None, given: CallTensors) -> None:
        """Raise unless the arguments fit a plan with or without drafts."""
        check_logits(logits, plan.num_rows, self._logits)
        self._calls.check(plan, given, plan.num_rows)
        check_has_positions(edits_of(plan, given), positions)
        if positions is not None:
            check_positions(positions, len(plan.slots), self._logits.device)


def _inputs_of_rows(plan: Plan, logits: Tensor, positions: Tensor | None, given: CallTensors) -> dict[str, Tensor]:
    """The inputs of a step that draws nothing, one entry a row, with drafts too; positions of None count as 0."""
    if positions is None:
        positions = torch.zeros(len(plan.slots), dtype=torch.int64, device=logits.device)
    tensors = {"logits": logits, "positions": positions, **given}
    if plan.num_drafts is not None:
        planned = plan.inputs(frozenset(("slots", "num_drafts")), on_host=False)
        found = entries_of_rows(planned["slots"], planned["num_drafts"], positions, plan.num_rows)
        tensors["slots"], tensors["positions"] = found
    return tensors
