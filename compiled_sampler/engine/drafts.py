"""Drafts that a sampler drew: handles, with the distributions that they were drawn from, and the cache of logits.

A verification by the rules "rejection" and "block" is exact only for the distribution that a draft was drawn from. A
handle carries it from ``draft`` to ``verify``, so that no other can be passed by mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.batch import DraftTable, SampleOutputs
from compiled_sampler.core.stage import Run
from compiled_sampler.engine.plan import Plan
from compiled_sampler.modes import CACHE, MOST_DRAFTS, PROCESSED, PROPOSALS
from compiled_sampler.passes.blocks import all_rows
from compiled_sampler.speculation.row_layout import drafted, rows_of_places


class DraftCache:
    """A draft table of one size, which steps write and read in place, and what was written where, on the host."""

    def __init__(self, num_slots: int, width: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):
            # [S + 1, K, V]; the last slot takes what padding writes
            self.table = DraftTable(torch.zeros(num_slots + 1, width, vocab_size, dtype=dtype, device=device))
        self.width = width
        self._count = 0
        self._written = np.zeros((num_slots + 1, width), np.int64)  # number of the last draft; padding is the last row

    @property
    def num_bytes(self) -> int:
        """Bytes of the table."""
        return self.table.logits.nbytes

    def write(self, logits: Tensor, slots: Tensor, offsets: Tensor, run: Run) -> None:
        """Put logits ``[R, >=V]`` to the places of drafts; each slot once, -1 for padding, offsets in ``[0, K)``."""
        rows = all_rows(self.table)
        rows.index_copy_(0, run(rows_of_places, slots, offsets, self.table), logits[:, : rows.shape[1]])

    def claim(self, plan: Plan, offset: int) -> int:
        """The number of a draft, from 1, which takes the places of the plan's requests at ``offset``."""
        if offset >= self.width:
            raise ValueError(
                f"offset of an uncoupled draft must be in [0, draft_cache_len), here {self.width}, got {offset}; draft "
                "less, or Sampler(draft_cache_len=...) of the longest block"
            )
        if plan.repeats_slots:
            raise ValueError(
                f"slots of an uncoupled draft must differ, as each has one place in the draft cache, got {plan.slots}; "
                "Sampler(draft_cache_len=0) keeps the logits in the handles"
            )
        self._count += 1
        self._written[plan.ids if plan.has_planned_slots else slice(None), offset] = self._count
        return self._count

    def check_holds(self, plan: Plan, drafted: Sequence[tuple[Plan, int]]) -> None:
        """Raise unless the cache still holds the drafts that a plan verifies; ``drafted``: their plans and numbers."""
        counts = np.array(plan.num_drafts if plan.has_planned_counts else [plan.width] * len(plan.ids), np.int64)
        for offset, (before, number) in enumerate(drafted[: plan.width]):
            if plan.has_planned_slots and before.has_planned_slots:
                gone = (self._written[plan.ids, offset] != number) & (plan.ids >= 0) & (counts > offset)
            else:
                # Which slots a buffer of the engine names is not known here. So it must be the one that was drafted
                # with, and no later draft may have been made at the same offset, of whatever slot.
                if plan.has_planned_slots or before.has_planned_slots or plan.slot_ids is not before.slot_ids:
                    raise ValueError(
                        "slot_ids of the plan must be the buffer that the drafts were made with, as it says where "
                        "they are in the draft cache; draft() with the same replaced plan"
                    )
                gone = np.full(len(plan.ids), bool((self._written[:, offset] != number).any()))
            if gone.any():
                request = int(gone.argmax())
                raise ValueError(
                    f"drafts must still be in the draft cache; that of request {request} (slot {plan.slots[request]}) "
                    f"at offset {offset} gave way to a later draft, or to warmup(); draft() again"
                )

    def forget(self) -> None:
        """Hold no draft any more."""
        self._written[:] = 0


class Draft(NamedTuple):
    """The handle of one draft for every request of a plan, from ``Sampler.draft``."""

    drawn: SampleOutputs
    """Tokens and status ``[N]``."""
    logits: Tensor | None
    """``[N, >=V]`` that the draft was drawn from; None for a coupled draft, and where the draft cache has them."""
    plan: Plan
    """The plan that the draft was drawn for."""
    offset: int
    """Drafts of the same block before this one."""
    number: int = 0
    """The draft's number in the draft cache, from 1; 0 where its logits are not there."""

    def __repr__(self) -> str:
        """The plan, the place in the block and the noise; no tensor is printed, which would wait for the device."""
        return f"Draft(offset={self.offset}, coupled={self.is_coupled}, plan={self.plan!r})"

    @property
    def is_coupled(self) -> bool:
        """Whether the draft used the target's noise."""
        return self.logits is None and not self.number

    @property
    def token_ids(self) -> Tensor:
        """int64 ``[N]``; -1 for padding, for rows in which every token is masked, and where not covered."""
        return self.drawn.token_ids


class Proposals(NamedTuple):
    """The distributions that drafts were drawn from, as a caller passes them; neither for one-hot drafts."""

    probs: Tensor | None = None  # float32 [D, >=V]
    logits: Tensor | None = None  # [D, >=V], to be filtered like the target's unless they are processed
    are_cached: bool = False  # whether such logits are in the draft cache instead
    are_processed: bool = False  # whether the drafter edited and filtered the logits itself

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the caller."""
        return [rows for rows in (self.probs, self.logits) if rows is not None]

    def in_dtype(self, dtype: torch.dtype) -> Proposals:
        """The same for a sampler of this dtype: see ``in_sampler_dtype``."""
        return self if self.logits is None else self._replace(logits=in_sampler_dtype(self.logits, dtype))

    def forms(self, rule: str, plan: Plan) -> tuple[str, ...]:
        """The forms, as ``Mode.drafts``, that describe the call; all for a plan without any draft."""
        if self.probs is not None and self.logits is not None:
            raise ValueError(
                "draft_probs and draft_logits must not both be given; pass what the drafts were drawn from"
            )
        if self.are_processed and self.logits is None:
            raise ValueError("draft_logits_are must be 'raw' without draft_logits, got 'processed'; pass draft_logits")
        if rule == "match":
            if self.probs is not None or self.logits is not None:
                raise ValueError("rule 'match' never looks at draft_probs or draft_logits, got them; leave them out")
            return ("one_hot",)
        if not plan.width:
            return (*PROPOSALS, CACHE, PROCESSED)
        if self.are_cached:
            return (CACHE,)
        if self.probs is None and self.logits is None:
            return ("one_hot",)
        if self.logits is None:
            return ("probabilities",)
        return (PROCESSED,) if self.are_processed else ("logits",)

    def rows(self, form: str, target: Tensor) -> Tensor | None:
        """What a step of one form reads, ``[D, >=V]``, of no rows if there is none; None if it takes none."""
        if form in ("one_hot", CACHE):
            return None
        rows = self.probs if form == "probabilities" else self.logits
        if rows is not None:
            return rows
        return target[:0].to(torch.float32) if form == "probabilities" else target[:0]


ONE_HOT = Proposals()
"""No distributions."""


class HandleTokens:
    """Puts the tokens of handles together, at one address for up to ``rows`` requests, so that calls are known."""

    def __init__(self, rows: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._kept = torch.empty(rows * MOST_DRAFTS, dtype=torch.int64, device=device)

    def of(self, drafts: Sequence[Draft], count: int, *, is_kept: bool) -> Tensor:
        """The tokens int64 ``[N, K]`` of K handles; ``is_kept`` says whether the next call may overwrite them."""
        shape, size = (count, len(drafts)), count * len(drafts)
        if not drafts:
            return self._kept.new_empty(shape)
        into = self._kept[:size].view(shape) if is_kept and size <= len(self._kept) else None
        return torch.stack([draft.token_ids for draft in drafts], 1, out=into)


def proposals_of(
    plan: Plan, drafts: Sequence[Draft], rule: str, proposals: Proposals, cache: DraftCache | None
) -> Proposals:
    """What checked handles were drawn from, if the rule reads it: their logits ``[D, >=V]``, unless cached."""
    if proposals.tensors:
        raise ValueError(
            "draft_probs and draft_logits must not be given with handles, which hold what was drawn from; drop them"
        )
    if proposals.are_processed:
        raise ValueError(
            "draft_logits_are must be 'raw' with handles, got 'processed': draft() filtered their logits with the "
            "parameters of the requests; pass tokens and draft_logits"
        )
    if rule == "match":
        return ONE_HOT
    _check_independent(plan, drafts, rule)
    if cache is None or not plan.width:
        return Proposals(logits=_draft_rows(plan, drafts))
    cache.check_holds(plan, [(draft.plan, draft.number) for draft in drafts])
    return Proposals(are_cached=True)


def in_sampler_dtype(draft_logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Draft logits of 16 bits as float32 for a float32 sampler, which is exact; any others as they are."""
    is_narrow = isinstance(draft_logits, Tensor) and draft_logits.dtype in (torch.bfloat16, torch.float16)
    return draft_logits.to(dtype) if is_narrow and dtype == torch.float32 else draft_logits


def check_handles(plan: Plan, drafts: Sequence[Draft]) -> None:
    """Raise unless handles are of the plan's requests, which are still held, and in the order of their offsets."""
    if isinstance(drafts, Draft) or not isinstance(drafts, Sequence) or not all(isinstance(d, Draft) for d in drafts):
        raise TypeError(
            f"draft_token_ids must be a torch.Tensor or a list of handles of draft(), got {type(drafts).__name__}; "
            "torch.tensor(token_ids), or [handle]"
        )
    for offset, draft in enumerate(drafts):
        if draft.token_ids.dim() != 1:
            raise ValueError("drafts must be of one token a request, got siblings; pass token_ids and parents instead")
        if draft.plan.slots != plan.slots:
            raise ValueError(
                f"drafts must be of the plan's slots {plan.slots}, got {draft.plan.slots}; draft() with its plan"
            )
        if not draft.plan.origin.has_requests_of(plan.origin):
            raise ValueError(
                f"drafts must be of the requests that hold the plan's slots {plan.slots}, got those of requests that "
                "are gone or of another sampler; draft() again"
            )
        if draft.offset != offset:
            raise ValueError(f"drafts must be in the order of their offsets, got {draft.offset} at {offset}; sort them")


def _check_independent(plan: Plan, drafts: Sequence[Draft], rule: str) -> None:
    """Raise unless all drafts have noise of their own, and there are as many as the plan says."""
    if any(draft.is_coupled for draft in drafts):
        raise ValueError(
            f"rule {rule!r} needs drafts with noise of their own: with coupled drafts the test of p against q is not "
            "independent of the draft and the law is lost; draft(coupled=False), or rule='match'"
        )
    if plan.width > len(drafts):
        raise ValueError(f"drafts must be at least the plan's {plan.width}, got {len(drafts)}; draft more or plan less")


def _draft_rows(plan: Plan, drafts: Sequence[Draft]) -> Tensor | None:
    """The logits of the plan's drafts, ``[D, >=V]`` in the order of the requests; None for a plan without any draft."""
    if not plan.width:
        return None
    stacked = torch.stack([draft.logits for draft in drafts[: plan.width] if draft.logits is not None], 1).flatten(0, 1)
    is_known = plan.has_planned_counts  # the engine's counts are known on the device alone
    index = plan.drafted if is_known else drafted(plan.counts, plan.width, plan.num_proposals)
    return stacked if index is None else stacked[index]
