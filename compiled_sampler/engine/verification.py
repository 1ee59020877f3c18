"""Runs of verifications: a step as wide as a captured variant, and results as wide as the caller's drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import VerifyOutputs
from compiled_sampler.edit_names import Leave
from compiled_sampler.engine.boundary.arguments import check_logprobs
from compiled_sampler.engine.boundary.outputs import check_outputs, copied, empty_outputs
from compiled_sampler.engine.boundary.tensors import (
    RowFormat,
    check_consumes,
    check_drafts,
    check_logits,
    check_positions,
)
from compiled_sampler.engine.drafts.draft_cache import DraftCache
from compiled_sampler.engine.drafts.draft_handles import (
    ONE_HOT,
    Draft,
    HandleTokens,
    Proposals,
    check_handles,
    in_sampler_dtype,
    proposals_of,
)
from compiled_sampler.engine.plans.plan import Plan
from compiled_sampler.engine.plans.plan_checks import (
    check_counts_fit,
    check_has_boundary,
    check_has_drafts,
    check_keeps_watermark,
)
from compiled_sampler.engine.steps.call_tensors import CallReader, CallTensors, OfEdits, edits_of
from compiled_sampler.engine.steps.known_calls import KnownCalls
from compiled_sampler.engine.steps.result_ring import ResultRings, Ring, is_ring
from compiled_sampler.engine.steps.step import Step
from compiled_sampler.engine.steps.step_runner import PreparedStep, StepRunner
from compiled_sampler.logprobs import Logprobs, mapped
from compiled_sampler.modes import Mode, check_rule, probabilities_mode
from compiled_sampler.speculation.row_layout import padded

NONE: CallTensors = MappingProxyType({})
"""What edits get where there are none."""


class VerificationTensors(NamedTuple):
    """The tensors of one verification, and which logprobs it returns."""

    target: Tensor
    """``[R, >=V]``, logits or probabilities of the target."""
    token_ids: Tensor
    """int64 or int32, padded ``[N, K]`` or flat ``[D]``."""
    positions: Tensor
    """int64 or int32 ``[N]``."""
    proposals: Proposals
    """The distributions that the drafts were drawn from."""
    of_edits: CallTensors = NONE
    """What edits get with the call, a row for each row of the target ``[R]``."""
    consumes: Leave = False
    """Whether edits may write into the target's logits."""
    logprobs: Logprobs | None = None
    """Which are returned; None for none."""
    is_captured: bool = False
    """Whether the current stream is being captured."""


_Call = Callable[[Plan, VerificationTensors, Any], VerifyOutputs]


class Verifier:
    """Verifies drafts on the backend of a runner; plans must be current, every other argument is checked here.

    Args:
        runner: runs the steps.
        logits: the format of the sampler's logits.
        cache: the draft cache; None without one.
    """

    def __init__(self, runner: StepRunner, logits: RowFormat, cache: DraftCache | None = None) -> None:
        """Keep the runner and the formats of logits and of probabilities."""
        self._runner, self._logits, self._cache = runner, logits, cache
        self._probs = logits._replace(dtype=torch.float32)
        self._calls = CallReader(runner.custom, logits.vocab_size, logits.device)
        self._known: KnownCalls[_Call] = KnownCalls()
        self._tokens = HandleTokens(runner.largest_bucket, logits.device)
        self._rings = ResultRings(logits.device)

    def verify(
        self,
        plan: Plan,
        logits: Tensor,
        draft_token_ids: Tensor | Sequence[Draft],
        positions: Tensor,
        rule: str,
        proposals: Proposals,
        out: VerifyOutputs | Ring | None,
        of_edits: OfEdits,
        options: tuple[Leave, Logprobs | None, bool],
    ) -> VerifyOutputs:
        """The accepted drafts of every request and one token more; see ``Sampler.verify``.

        The options are the last fields of ``VerificationTensors``.
        """
        for_edits = self._calls.read(plan, *of_edits)
        if isinstance(draft_token_ids, Tensor):
            given = VerificationTensors(logits, draft_token_ids, positions, proposals, for_edits, *options)
        else:
            check_has_drafts(plan, True)
            check_rule(rule)
            check_handles(plan, draft_token_ids)
            drawn_from = proposals_of(plan, draft_token_ids, rule, proposals, self._cache)
            *_, is_captured = options
            is_kept = self._runner.backend == "graph" and not is_captured  # variants are replayed one after the other
            tokens = self._tokens.of(draft_token_ids, len(plan.slots), is_kept=is_kept)
            given = VerificationTensors(logits, tokens, positions, drawn_from, for_edits, *options)
        return self._run(plan, plan.mode, rule, given, out)

    def verify_from_probs(
        self,
        plan: Plan,
        probs: Tensor,
        draft_token_ids: Tensor,
        positions: Tensor,
        rule: str,
        proposals: Proposals,
        *,
        out: VerifyOutputs | Ring | None,
        is_captured: bool,
    ) -> VerifyOutputs:
        """The accepted drafts of every request and one token more; see ``Sampler.verify_from_probs``."""
        given = VerificationTensors(probs, draft_token_ids, positions, proposals, is_captured=is_captured)
        return self._run(plan, probabilities_mode(self._logits.vocab_size), rule, given, out)

    def _run(
        self, plan: Plan, mode: Mode, rule: str, given: VerificationTensors, out: VerifyOutputs | Ring | None
    ) -> VerifyOutputs:
        """Run a step that fits the arguments, which are checked unless such ones were."""
        target, token_ids, positions, proposals, of_edits, consumes, logprobs, is_captured = given
        drawn_from = () if proposals is ONE_HOT else (*proposals.tensors,)
        forms = proposals.probs is None, proposals.logits is None, *proposals[2:]
        if consumes is not False:
            check_logits(target, plan.num_rows, self._logits)
            check_consumes(consumes, target, *drawn_from, *of_edits.values(), *self._calls.states)
        is_plain = not of_edits and consumes is False
        edits = plan.edits if is_plain else edits_of(plan, of_edits, consumes, logprobs, rule == "match")
        sizes = plan.num_rows, plan.num_proposals, plan.width, len(plan.slots)
        of_plan = mode.name, *sizes, plan.constant, plan.replaced
        step = (*of_plan, rule, forms, edits, logprobs, self._runner.generation, is_captured)
        read = (target, token_ids, positions, *drawn_from, *of_edits.values())
        new, call = self._known.find(step, (*read, *plan.device_tensors) if plan.replaced else read, out)
        if call is None:
            fields: Any = {"stops": bool(edits), "logprobs": logprobs}
            call = self._rings.prepared(
                partial(self._prepared, mode, rule, edits),
                (plan, given, out),
                is_captured,
                lambda: (VerifyOutputs, _width(plan, given) + 1, fields),
            )
            self._known.put(new, call)
        if plan.replaced:
            check_counts_fit(plan, _width(plan, given))
        made: VerifyOutputs = call(plan, given, out)
        return made

    def _prepared(
        self, mode: Mode, rule: str, edits: tuple[str, ...], plan: Plan, given: VerificationTensors, out: Any
    ) -> _Call:
        """A call of the narrowest prepared step that is wide enough, for arguments like these, which are checked."""
        name, form = ("target_probs", self._probs) if mode.from_probabilities else ("logits", self._logits)
        check_has_drafts(plan, True)
        check_logits(given.target, plan.num_rows, form, name)
        check_positions(given.positions, len(plan.slots), form.device)
        check_rule(rule)
        check_keeps_watermark(plan, mode, rule)
        proposals, device = self._in_sampler_dtype(given.proposals), self._logits.device
        forms = proposals.forms(rule, plan)
        self._check_proposals(proposals, plan.num_proposals)
        count = len(plan.slots)
        check_drafts(given.token_ids, count, plan.width, plan.num_proposals, device)
        width, for_edits = _width(plan, given), given.of_edits
        if not mode.from_probabilities:
            self._calls.check(plan, for_edits, plan.num_rows)
        check_logprobs(given.logprobs, form.vocab_size)
        check_has_boundary(edits, given.logprobs)
        fields: Any = {"stops": bool(edits), "logprobs": given.logprobs}
        if out is not None:
            read = (given.target, given.token_ids, given.positions, *proposals.tensors, *for_edits.values())
            inputs = (*read, *plan.device_tensors, *self._calls.states)
            check_outputs(out, VerifyOutputs, count, width + 1, device, inputs, **fields)
        if not count:
            empty = partial(empty_outputs, VerifyOutputs, width + 1, device, **fields)
            return lambda plan, given, out: empty() if out is None or is_ring(out) else out
        step = self._runner.verification(Step("verify", mode, width, edits, given.logprobs), rule, forms)
        is_moved = plan.cumulative_drafts is not None or (given.token_ids.dim() == 1 and not plan.has_equal_counts)
        if step.width != width or proposals.logits is not given.proposals.logits or is_moved:
            return partial(self._derived, step)
        run = self._runner.prepared(step, plan, _step_inputs(plan, given, step), out)
        is_plain = given.token_ids.dim() == 2 and step.mode.drafts == "one_hot"
        return partial(_as_padded, run) if is_plain else partial(_as_given, step, run)

    def _derived(self, step: Step, plan: Plan, given: VerificationTensors, out: VerifyOutputs | None) -> VerifyOutputs:
        """Run a step whose inputs are made from the arguments, and so lie elsewhere in each call."""
        tensors = _step_inputs(plan, given._replace(proposals=self._in_sampler_dtype(given.proposals)), step)
        width = _width(plan, given)
        is_wider = step.width != width
        made: VerifyOutputs = self._runner.run(step, plan, tensors, None if is_wider else out)
        if not is_wider:
            return made
        made = _first_places(made, width + 1)
        return made if out is None else copied(made, out)

    def _in_sampler_dtype(self, proposals: Proposals) -> Proposals:
        if proposals.logits is None:
            return proposals
        return proposals._replace(logits=in_sampler_dtype(proposals.logits, self._logits.dtype))

    def _check_proposals(self, proposals: Proposals, rows: int) -> None:
        if proposals.probs is not None:
            check_logits(proposals.probs, rows, self._probs, "draft_probs")
        if proposals.logits is not None:
            check_logits(proposals.logits, rows, self._logits, "draft_logits")


def _as_given(
    step: Step, run: PreparedStep, plan: Plan, given: VerificationTensors, out: VerifyOutputs | None
) -> VerifyOutputs:
    """Run a step on the arguments as they are."""
    made: VerifyOutputs = run(plan, _step_inputs(plan, given, step), out)
    return made


def _as_padded(run: PreparedStep, plan: Plan, given: VerificationTensors, out: VerifyOutputs | None) -> VerifyOutputs:
    """Run a step on padded one-hot drafts as they are: ``_as_given`` without its frames."""
    tensors = {"logits": given.target, "positions": given.positions, "draft_token_ids": given.token_ids}
    made: VerifyOutputs = run(plan, {**tensors, **given.of_edits} if given.of_edits else tensors, out)
    return made


def _first_places(made: VerifyOutputs, count: int) -> VerifyOutputs:
    """Views of the first ``count`` tokens of each request, and of their logprobs."""
    found = made.logprobs
    found = None if found is None else mapped(found, lambda each: each[:, :count])
    return made._replace(token_ids=made.token_ids[:, :count], logprobs=found)


def _width(plan: Plan, given: VerificationTensors) -> int:
    """K, drafts of a request: as padded, or the plan's width where they are flat."""
    return plan.width if given.token_ids.dim() == 1 else given.token_ids.shape[1]


def _padded(plan: Plan, token_ids: Tensor) -> Tensor:
    """Drafts ``[N, K]``; flat ones ``[D]`` as a view if all requests have K drafts, else by one gather."""
    shape = len(plan.slots), plan.width
    if token_ids.dim() == 2:
        return token_ids
    if plan.has_equal_counts:
        return token_ids.view(shape)
    if plan.has_planned_counts:
        return token_ids[plan.padded].view(shape)
    return padded(token_ids, plan.counts, plan.width)


def _step_inputs(plan: Plan, given: VerificationTensors, step: Step) -> dict[str, Tensor]:
    """The inputs of a verification step by name, with as many drafts as it takes.

    Args:
        plan: of the call.
        given: of the call, at most ``step.width`` drafts a request; they are padded with -1.
        step: which runs.
    """
    token_ids = _padded(plan, given.token_ids)
    if missing := step.width - token_ids.shape[1]:
        token_ids = F.pad(token_ids, (0, missing), value=-1)
    tensors = {"logits": given.target, "positions": given.positions, "draft_token_ids": token_ids, **given.of_edits}
    proposals = given.proposals.rows(step.mode.drafts, given.target)
    if proposals is not None:
        tensors["proposals"] = proposals
    if plan.cumulative_drafts is not None:
        # of sums a new tensor each time: the route must be chosen for the very one that is read
        tensors["num_drafts"] = plan.counts
    return tensors
