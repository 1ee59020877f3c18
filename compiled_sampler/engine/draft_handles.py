"""Drafts as a drafter hands them to ``verify``: with what they were drawn from, so that no other law is tested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import SampleOutputs
from compiled_sampler.engine.plan import Plan
from compiled_sampler.modes import PROPOSALS
from compiled_sampler.speculation.row_layout import drafted


class Draft(NamedTuple):
    """One draft for every request of a plan, from ``Sampler.draft``."""

    drawn: SampleOutputs
    """Tokens and status ``[N]``."""
    logits: Tensor | None
    """``[N, >=V]``, what the draft was drawn from; None for a coupled one, which races on the target's noise."""
    plan: Plan
    """Of the call that drew it."""
    offset: int
    """Drafts of the same block before this one."""

    @property
    def token_ids(self) -> Tensor:
        """int64 ``[N]``; -1 for padding and where every token is masked."""
        return self.drawn.token_ids


def proposal_kinds(rule: str, plan: Plan, draft_probs: Tensor | None, draft_logits: Tensor | None) -> tuple[str, ...]:
    """What a verification reads besides the drafts, of ``modes.PROPOSALS``: any of them where there are no drafts.

    Raises:
        ValueError: both are given, or one that the rule does not use.
    """
    if draft_probs is not None and draft_logits is not None:
        raise ValueError("draft_probs and draft_logits must not both be given; pass what the drafts were drawn from")
    if rule == "match":
        if draft_probs is not None or draft_logits is not None:
            raise ValueError("rule 'match' never looks at draft_probs or draft_logits, got them; leave them out")
        return ("one_hot",)
    if not plan.width:
        return PROPOSALS
    if draft_probs is None and draft_logits is None:
        return ("one_hot",)
    return ("logits",) if draft_probs is None else ("probabilities",)


def proposals_of(kind: str, given: tuple[Tensor | None, Tensor | None], logits: Tensor) -> Tensor | None:
    """What drafts were drawn from, as one kind of verification reads it; no rows where it reads what is not given.

    Args:
        kind: one of ``modes.PROPOSALS``.
        given: probabilities and logits, ``[D, >=V]``.
        logits: ``[R, >=V]``, of the target.
    """
    if kind == "one_hot":
        return None
    found = given[0] if kind == "probabilities" else given[1]
    if found is not None:
        return found
    return logits[:0].to(torch.float32) if kind == "probabilities" else logits[:0]


def stacked_token_ids(plan: Plan, drafts: Sequence[Draft], device: torch.device) -> Tensor:
    """The tokens of handles as int64 ``[N, K]``.

    Raises:
        TypeError: no sequence of handles.
        ValueError: handles of other requests, or not in the order of their offsets.
    """
    if isinstance(drafts, Draft) or not isinstance(drafts, Sequence) or not all(isinstance(d, Draft) for d in drafts):
        raise TypeError(
            f"draft_token_ids must be a torch.Tensor or a list of handles of draft(), got {type(drafts).__name__}; "
            "wrap a single handle in a list"
        )
    for offset, draft in enumerate(drafts):
        if draft.plan.slots != plan.slots:
            raise ValueError(
                f"drafts must be of the plan's slots {plan.slots}, got {draft.plan.slots}; draft() with its plan"
            )
        if draft.plan.owner is not plan.owner or draft.plan.generations != plan.generations:
            raise ValueError(
                f"drafts must be of the requests that hold the plan's slots {plan.slots}, got those of requests that "
                "are gone or of another sampler; draft() again"
            )
        if draft.offset != offset:
            raise ValueError(f"drafts must be in the order of their offsets, got {draft.offset} at {offset}; sort them")
    if not drafts:
        return torch.empty(len(plan.slots), 0, dtype=torch.int64, device=device)
    return torch.stack([draft.token_ids for draft in drafts], 1)


def opened(
    plan: Plan, drafts: Sequence[Draft], rule: str, given: tuple[Tensor | None, Tensor | None], device: torch.device
) -> tuple[Tensor, tuple[None, Tensor | None]]:
    """What handles hold: tokens ``[N, K]``, and as draft logits ``[D, >=V]`` what a rule other than ``match`` reads.

    Raises:
        TypeError: no sequence of handles.
        ValueError: handles that do not fit the plan or the rule; draft probabilities or logits besides them.
    """
    token_ids = stacked_token_ids(plan, drafts, device)
    if any(tensor is not None for tensor in given):
        raise ValueError(
            "draft_probs and draft_logits must not be given with handles, which hold what was drawn from; drop them"
        )
    return token_ids, (None, None if rule == "match" else _draft_rows(plan, drafts, rule))


def in_dtype(draft_logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Draft logits in the sampler's dtype where it holds all their numbers; others stay as they are, to be refused."""
    is_narrow = isinstance(draft_logits, Tensor) and draft_logits.dtype in (torch.bfloat16, torch.float16)
    return draft_logits.to(dtype) if is_narrow and dtype == torch.float32 else draft_logits


def _draft_rows(plan: Plan, drafts: Sequence[Draft], rule: str) -> Tensor | None:
    rows = [draft.logits for draft in drafts if draft.logits is not None]
    if len(rows) < len(drafts):
        raise ValueError(
            f"rule {rule!r} needs drafts with noise of their own: with coupled drafts the test of p against q is not "
            "independent of the draft and the law is lost; draft(coupled=False), or rule='match'"
        )
    if plan.width > len(rows):
        raise ValueError(f"drafts must be at least the plan's {plan.width}, got {len(rows)}; draft more or plan less")
    if not plan.width:
        return None
    stacked = torch.stack(rows[: plan.width], 1).flatten(0, 1)
    index = plan.drafted
    if plan.draft_counts is not None and not plan.has_planned_counts:  # an engine's buffer, known on the device alone
        index = drafted(plan.draft_counts, plan.width, plan.num_proposals)
    return stacked if index is None else stacked[index]


def verification_tensors(
    plan: Plan, logits: Tensor, draft_token_ids: Tensor, positions: Tensor, proposals: Tensor | None, width: int
) -> dict[str, Tensor]:
    """The inputs of a verification step by name, with drafts ``[N, width]``.

    Args:
        plan: with drafts.
        logits: ``[R, >=V]``.
        draft_token_ids: int64 ``[N, K]``.
        positions: int64 ``[N]``.
        proposals: ``[D, >=V]``; None for one-hot drafts.
        width: at least K; drafts are padded with -1.
    """
    missing = width - draft_token_ids.shape[1]
    tensors = {
        "logits": logits,
        "slots": plan.slot_ids,
        "positions": positions,
        "num_drafts": plan.draft_counts,
        "draft_token_ids": draft_token_ids if not missing else F.pad(draft_token_ids, (0, missing), value=-1),
        "proposals": proposals,
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
