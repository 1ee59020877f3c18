"""Verifications: a step as wide as a captured variant, and results as wide as the caller's drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import VerifyOutputs
from compiled_sampler.edits.names import Leave
from compiled_sampler.engine.boundary.arguments import check_logprobs
from compiled_sampler.engine.boundary.tensors import (
    RowFormat,
    check_consumes,
    check_drafts,
    check_logits,
    check_outputs,
    check_positions,
)
from compiled_sampler.engine.calls import Calls
from compiled_sampler.engine.drafts import (
    ONE_HOT,
    Draft,
    DraftCache,
    HandleTokens,
    Proposals,
    check_handles,
    proposals_of,
)
from compiled_sampler.engine.plan import (
    Plan,
    check_counts_fit,
    check_has_boundary,
    check_has_drafts,
    check_keeps_watermark,
)
from compiled_sampler.engine.step import Step
from compiled_sampler.engine.step_runner import Launch, StepRunner, copied
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.modes import Mode, check_rule, check_tree_rule
from compiled_sampler.pipeline.chunks import map_rows
from compiled_sampler.speculation.row_layout import padded

_NONE: Mapping[str, Tensor] = MappingProxyType({})


class VerifyCall(NamedTuple):
    """The tensors of one verification, and which logprobs it returns."""

    target: Tensor
    """``[R, >=V]``, logits or probabilities of the target."""
    token_ids: Tensor
    """int64 or int32, padded ``[N, K]`` or flat ``[D]``."""
    positions: Tensor
    """int64 or int32 ``[N]``."""
    proposals: Proposals
    """The distributions that the drafts were drawn from."""
    edits: tuple[str, ...]
    """The names of the edits of the call."""
    edit_tensors: Mapping[str, Tensor] = _NONE
    """What edits get with the call, a row for each row of the target ``[R]``, by the names of a step's inputs."""
    consumes: Leave = False
    """Whether edits may write into the target's logits."""
    logprobs: Logprobs | None = None
    """Which are returned; None for none."""
    is_captured: bool = False
    """Whether the current stream is being captured."""
    parents: Tensor | None = None
    """int64 or int32, padded or flat as ``token_ids``; None for chains."""

    def width(self, plan: Plan) -> int:
        """K, drafts of a request: as padded, or the plan's width where they are flat."""
        return plan.width if self.token_ids.dim() == 1 else self.token_ids.shape[1]


class Verifier:
    """Verifies drafts on the backend of a runner; plans must be current, every other argument is checked here."""

    def __init__(self, runner: StepRunner, logits: RowFormat, draft_cache: DraftCache | None, calls: Calls) -> None:
        self._runner, self._logits, self._draft_cache, self._calls = runner, logits, draft_cache, calls
        self._probs = logits._replace(dtype=torch.float32)
        self._tokens = HandleTokens(runner.largest_bucket, logits.device)

    def of_handles(
        self, plan: Plan, drafts: Sequence[Draft], rule: str, proposals: Proposals, is_captured: bool
    ) -> tuple[Tensor, Proposals]:
        """The token ids ``[N, K]`` of handles, and what they were drawn from."""
        check_has_drafts(plan, True)
        check_rule(rule)
        check_handles(plan, drafts)
        drawn_from = proposals_of(plan, drafts, rule, proposals, self._draft_cache)
        is_kept = self._runner.backend == "graph" and not is_captured  # variants are replayed one after the other
        return self._tokens.of(drafts, len(plan.slots), is_kept=is_kept), drawn_from

    def verify(self, plan: Plan, mode: Mode, rule: str, call: VerifyCall, out: VerifyOutputs | None) -> VerifyOutputs:
        """The accepted drafts of every request and one token more; see ``Sampler.verify``."""
        target, token_ids, positions, proposals, edits, edit_tensors, consumes, logprobs, is_captured, parents = call
        drawn_from = () if proposals is ONE_HOT else (*proposals.tensors,)
        forms = proposals.probs is None, proposals.logits is None, *proposals[2:]
        if consumes is not False:
            check_logits(target, plan.num_rows, self._logits)
            states = self._runner.custom.states.every
            check_consumes(consumes, target, *drawn_from, *edit_tensors.values(), *states)

        def resolve() -> Launch:
            self._check(plan, mode, rule, call, out)
            return self._resolve(plan, mode, rule, call, out)

        shape = mode.name, plan.num_rows, plan.num_proposals, plan.width, len(plan.slots), plan.replaced
        key = ("verify", *shape, rule, forms, edits, logprobs, parents is None)
        of_trees = () if parents is None else (parents,)
        tensors = (target, token_ids, positions, *of_trees, *drawn_from, *edit_tensors.values())
        read = (*tensors, *plan.device_tensors) if plan.replaced else tensors
        launch = self._calls.launch_for(key, read, out, resolve, is_captured)
        verified: VerifyOutputs = launch(plan, call, out)
        return verified

    def _check(self, plan: Plan, mode: Mode, rule: str, call: VerifyCall, out: Any) -> None:
        name, form = ("target_probs", self._probs) if mode.from_probabilities else ("logits", self._logits)
        count, device, custom = len(plan.slots), self._logits.device, self._runner.custom
        check_has_drafts(plan, True)
        check_logits(call.target, plan.num_rows, form, name)
        check_positions(call.positions, count, device)
        check_rule(rule)
        check_keeps_watermark(plan, mode, rule)
        proposals = call.proposals.in_dtype(self._logits.dtype)
        forms = proposals.forms(rule, plan)
        if proposals.probs is not None:
            check_logits(proposals.probs, plan.num_proposals, self._probs, "draft_probs")
        if proposals.logits is not None:
            check_logits(proposals.logits, plan.num_proposals, self._logits, "draft_logits")
        check_drafts(call.token_ids, count, plan.width, plan.num_proposals, device)
        if call.parents is not None:
            check_tree_rule(rule, forms[0] if plan.width else "")
            check_drafts(call.parents, count, plan.width, plan.num_proposals, device, "parents")
            if call.parents.shape != call.token_ids.shape:
                shapes = list(call.token_ids.shape), list(call.parents.shape)
                raise ValueError(f"parents must be {shapes[0]} like draft_token_ids, got {shapes[1]}; pad both alike")
        if not mode.from_probabilities:
            custom.check_given(plan.edits, call.edit_tensors, plan.num_rows, device)
        check_logprobs(call.logprobs, mode.vocab_size)
        check_has_boundary(call.edits, call.logprobs)
        if out is not None:
            tensors = (call.target, call.token_ids, call.positions, *proposals.tensors, *call.edit_tensors.values())
            read, sizes = (*tensors, *plan.device_tensors, *custom.states.every), (count, call.width(plan) + 1)
            has_edits, of_trees = bool(call.edits), call.parents is not None
            read = read if call.parents is None else (*read, call.parents)
            check_outputs(
                *(out, VerifyOutputs, *sizes, device, read),
                has_edits=has_edits, logprobs=call.logprobs, of_trees=of_trees,
            )  # fmt: skip

    def _resolve(self, plan: Plan, mode: Mode, rule: str, call: VerifyCall, out: Any) -> Launch:
        """The narrowest registered step that is wide enough, for arguments like these, which are checked."""
        proposals, width = call.proposals.in_dtype(self._logits.dtype), call.width(plan)
        wanted = Step("verify", mode, width, call.edits, call.logprobs, of_trees=call.parents is not None)
        step = self._runner.verification(wanted, rule, proposals.forms(rule, plan), not plan.has_planned_slots)
        # A tensor is made in each call where drafts are narrower than the step or flat, where draft logits are
        # converted, and where counts come as sums.
        is_moved = plan.cumulative_drafts is not None or (call.token_ids.dim() == 1 and not plan.has_equal_counts)
        if step.width != width or proposals.logits is not call.proposals.logits or is_moved:
            launch: Launch = partial(_verify_derived, self._runner, self._logits.dtype, step)
        else:
            resolved = self._runner.resolve(step, plan, _step_inputs(plan, call, step), out)
            launch = lambda plan, call, out: resolved(plan, _step_inputs(plan, call, step), out)  # noqa: E731
        return partial(_verify_counted, launch) if plan.replaced else launch


# No method: ``Calls`` holds it, and would hold itself by the verifier.
def _verify_derived(
    runner: StepRunner, dtype: torch.dtype, step: Step, plan: Plan, call: VerifyCall, out: VerifyOutputs | None
) -> VerifyOutputs:
    """Run a step with inputs that are made in each call, so that its route is chosen anew each time."""
    tensors = _step_inputs(plan, call._replace(proposals=call.proposals.in_dtype(dtype)), step)
    width = call.width(plan)
    is_wider = step.width != width
    verified: VerifyOutputs = runner.launch(step, plan, tensors, None if is_wider else out)
    if not is_wider:
        return verified
    verified = _first_places(verified, width + 1)
    return verified if out is None else copied(verified, out)


def _verify_counted(launch: Launch, plan: Plan, call: VerifyCall, out: Any) -> VerifyOutputs:
    """Run a step of a plan whose drafts an engine may count, in numbers that are others in each call."""
    check_counts_fit(plan, call.width(plan))
    verified: VerifyOutputs = launch(plan, call, out)
    return verified


def _first_places(verified: VerifyOutputs, count: int) -> VerifyOutputs:
    """Views of the first ``count`` tokens of each request, and of their logprobs."""
    if verified.node_ids is not None:
        verified = verified._replace(node_ids=verified.node_ids[:, : count - 1])
    logprobs = map_rows(lambda field: field[:, :count], verified.logprobs)
    return verified._replace(token_ids=verified.token_ids[:, :count], logprobs=logprobs)


def _padded(plan: Plan, values: Tensor, width: int) -> Tensor:
    """Numbers of drafts ``[N, width]``, -1 where there is no draft; flat ones ``[D]`` are a view if all have K."""
    if values.dim() == 1:
        shape = len(plan.slots), plan.width
        if plan.has_equal_counts:
            values = values.view(shape)
        elif plan.has_planned_counts:
            values = values[plan.padded].view(shape)
        else:
            values = padded(values, plan.counts, plan.width)
    missing = width - values.shape[1]
    return F.pad(values, (0, missing), value=-1) if missing else values


def _step_inputs(plan: Plan, call: VerifyCall, step: Step) -> dict[str, Tensor]:
    """The inputs of a verification step by name, its drafts padded to as many as it takes."""
    tensors = {"logits": call.target, "positions": call.positions, **call.edit_tensors}
    tensors["draft_token_ids"] = _padded(plan, call.token_ids, step.width)
    if call.parents is not None:
        tensors["parents"] = _padded(plan, call.parents, step.width)
    proposals = call.proposals.rows(step.mode.drafts, call.target)
    if proposals is not None:
        tensors["proposals"] = proposals
    if plan.cumulative_drafts is not None:
        # of sums a new tensor each time: the route must be chosen for the very one that is read
        tensors["num_drafts"] = plan.counts
    return tensors
