"""Runs of verifications: a step as wide as a captured variant, and results as wide as the caller's drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import VerifyOutputs
from compiled_sampler.engine.boundary.outputs import check_outputs, copied, empty_outputs
from compiled_sampler.engine.boundary.tensors import (
    RowFormat,
    check_drafts,
    check_logits,
    check_positions,
)
from compiled_sampler.engine.draft_handles import Draft, Proposals, in_sampler_dtype, tokens_and_proposals
from compiled_sampler.engine.plan import Plan
from compiled_sampler.engine.plan_checks import check_has_drafts
from compiled_sampler.engine.step_runner import StepRunner
from compiled_sampler.modes import Mode, check_rule, probabilities_mode


class VerificationTensors(NamedTuple):
    """The tensors of one verification."""

    target: Tensor
    """``[R, >=V]``, logits or probabilities of the target."""
    token_ids: Tensor
    """int64 ``[N, K]``."""
    positions: Tensor
    """int64 ``[N]``."""
    proposals: Proposals
    """The distributions that the drafts were drawn from."""


class Verifier:
    """Verifies drafts on the backend of a runner; plans must be current, every other argument is checked here.

    Args:
        runner: runs the steps.
        logits: the format of the sampler's logits.
    """

    def __init__(self, runner: StepRunner, logits: RowFormat) -> None:
        """Keep the runner and the formats of logits and of probabilities."""
        self._runner, self._logits = runner, logits
        self._probs = logits._replace(dtype=torch.float32)

    def verify(
        self,
        plan: Plan,
        logits: Tensor,
        draft_token_ids: Tensor | Sequence[Draft],
        positions: Tensor,
        *,
        rule: str,
        proposals: Proposals,
        out: VerifyOutputs | None,
    ) -> VerifyOutputs:
        """The accepted drafts of every request and one token more; see ``Sampler.verify``."""
        self._check(plan, logits, self._logits, "logits", positions, rule)
        if not isinstance(draft_token_ids, Tensor):
            handles, device = draft_token_ids, self._logits.device
            draft_token_ids, proposals = tokens_and_proposals(plan, handles, rule, proposals, device)
        return self._run(plan, plan.mode, rule, VerificationTensors(logits, draft_token_ids, positions, proposals), out)

    def verify_from_probs(
        self,
        plan: Plan,
        probs: Tensor,
        draft_token_ids: Tensor,
        positions: Tensor,
        *,
        rule: str,
        proposals: Proposals,
        out: VerifyOutputs | None,
    ) -> VerifyOutputs:
        """The accepted drafts of every request and one token more; see ``Sampler.verify_from_probs``."""
        self._check(plan, probs, self._probs, "target_probs", positions, rule)
        mode = probabilities_mode(self._logits.vocab_size)
        return self._run(plan, mode, rule, VerificationTensors(probs, draft_token_ids, positions, proposals), out)

    def _check(self, plan: Plan, rows: Tensor, form: RowFormat, name: str, positions: Tensor, rule: str) -> None:
        check_has_drafts(plan, True)
        check_logits(rows, plan.num_rows, form, name)
        check_positions(positions, len(plan.slots), form.device)
        check_rule(rule)

    def _run(
        self, plan: Plan, mode: Mode, rule: str, drafts: VerificationTensors, out: VerifyOutputs | None
    ) -> VerifyOutputs:
        """Run the narrowest prepared step that is wide enough, and cut its results to the width of the drafts."""
        proposals, device = drafts.proposals, self._logits.device
        if proposals.logits is not None:
            proposals = proposals._replace(logits=in_sampler_dtype(proposals.logits, self._logits.dtype))
        forms = proposals.forms(rule, plan)
        self._check_proposals(proposals, plan.num_proposals)
        check_drafts(drafts.token_ids, len(plan.slots), plan.width, device)
        count, width = drafts.token_ids.shape
        if out is not None:
            inputs = (drafts.target, drafts.token_ids, drafts.positions, *proposals, plan.slot_ids, plan.draft_counts)
            check_outputs(out, VerifyOutputs, count, width + 1, device, inputs)
        if not count:
            return empty_outputs(VerifyOutputs, width + 1, device) if out is None else out
        step = self._runner.verification(mode, rule, forms, width)
        rows = proposals.rows(step.mode.drafts, drafts.target)
        tensors = _step_inputs(plan, drafts, rows, step.width)
        made: VerifyOutputs = self._runner.run(step, tensors, out if step.width == width else None)
        if step.width == width:
            return made
        made = made._replace(token_ids=made.token_ids[:, : width + 1])
        return made if out is None else copied(made, out)

    def _check_proposals(self, proposals: Proposals, rows: int) -> None:
        if proposals.probs is not None:
            check_logits(proposals.probs, rows, self._probs, "draft_probs")
        if proposals.logits is not None:
            check_logits(proposals.logits, rows, self._logits, "draft_logits")


def _step_inputs(plan: Plan, drafts: VerificationTensors, proposals: Tensor | None, width: int) -> dict[str, Tensor]:
    """The inputs of a verification step by name, with drafts ``[N, width]``.

    Args:
        plan: with drafts.
        drafts: of the call, at most ``width`` a request; they are padded with -1.
        proposals: ``[D, >=V]``; None for one-hot drafts.
        width: of the step.
    """
    missing = width - drafts.token_ids.shape[1]
    tensors = {
        "logits": drafts.target,
        "slots": plan.slot_ids,
        "positions": drafts.positions,
        "num_drafts": plan.draft_counts,
        "draft_token_ids": drafts.token_ids if not missing else F.pad(drafts.token_ids, (0, missing), value=-1),
        "proposals": proposals,
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
