"""Checks of a caller's plan: its kind, and the buffers that an engine put into it. None of them waits for a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.edit_names import EDITS, READ_POSITIONS, ROW_FILTERS, reading
from compiled_sampler.engine.boundary.tensors import INTEGERS, check_tensor
from compiled_sampler.engine.plans.plan import REPLACEABLE, Plan
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.modes import MOST_DRAFTS, Mode


def check_has_drafts(plan: Plan, drafts: bool) -> None:
    """Raise unless a plan was made with drafts (to verify them) or without (to sample), as ``drafts`` says.

    Raises:
        ValueError: the plan is of the other kind.
    """
    if drafts and plan.num_drafts is None:
        raise ValueError("plan must say how many drafts each request has, got none; plan(slots, num_drafts=[...])")
    if not drafts and plan.num_drafts is not None:
        raise ValueError(f"plan must be without drafts, got num_drafts={plan.num_drafts}; verify() takes this one")


def check_served(own: Sequence[str], served: Sequence[str]) -> None:
    """Raise unless the edits that a plan is asked to serve have all those of its requests.

    Raises:
        ValueError: a request has another one.
    """
    missing = [name for name in own if name not in served]
    if missing:
        raise ValueError(
            f"edits must have those of the requests, here {own}, got {tuple(served)} without {missing[0]!r}; "
            "add it, or edits=None for those of the requests alone"
        )


def check_once(edits: Sequence[str], slots: Sequence[int]) -> None:
    """Raise unless each request stands once in a batch whose edits read the history.

    Raises:
        ValueError: a request stands twice: its rows would write the history at once, and none would see the other.
    """
    held = [slot for slot in slots if slot >= 0]
    found = reading(edits)
    if found and len(set(held)) < len(held):
        twice = next(slot for slot in held if held.count(slot) > 1)
        raise ValueError(
            f"slots must differ with {' and '.join(found)}, which read what a request drew, got {twice} twice; "
            "draft and verify several tokens of one request"
        )


def check_has_positions(edits: Sequence[str], positions: Tensor | None) -> None:
    """Raise unless positions are given where edits depend on them, as those of the user may.

    Raises:
        ValueError: none are given.
    """
    found = [name for name in edits if name in READ_POSITIONS or name not in EDITS]
    if found and positions is None:
        raise ValueError(f"positions must be given for {' and '.join(found)}, got None; probs(..., positions=...)")


def check_has_boundary(edits: Sequence[str], logprobs: Logprobs | None) -> None:
    """Raise unless the kept set of every row is a prefix of its order, where its last token is asked for.

    Raises:
        ValueError: a request has a filter of whole rows, whose kept set depends on the logits besides.
    """
    found = [name for name in edits if name in ROW_FILTERS]
    if found and logprobs is not None and logprobs.boundary:
        raise ValueError(
            f"boundary must not be asked for with {' and '.join(found)}, as the last token does not tell what is kept, "
            "got True; Logprobs(boundary=False)"
        )


def check_keeps_watermark(plan: Plan, mode: Mode, rule: str) -> None:
    """Raise unless a verification keeps the watermarks of a plan's requests.

    Raises:
        ValueError: a request has one, and the rule, or a draw from probabilities, has other noise.
    """
    if "watermark" in plan.edits and (rule != "match" or mode.from_probabilities):
        found = "verify_from_probs()" if mode.from_probabilities else f"rule {rule!r}"
        raise ValueError(f"watermark_tokens must be verified by verify(rule='match'), got {found}, of other noise")


def check_plan_buffers(plan: Plan, device: torch.device, num_slots: int) -> None:
    """Raise unless the buffers that an engine put into a plan are integers, one entry a slot, on the device.

    On the CPU, where to look waits for nothing, what they hold is checked too.

    Args:
        plan: of the caller.
        device: of the sampler.
        num_slots: S.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device; on the CPU an entry out of range.
    """
    given = _given_counts(plan)
    if given and plan.num_drafts is None:
        raise ValueError(f"plan.{given[0]} must be None without drafts, got a buffer; plan(slots, num_drafts=[...])")
    if len(given) > 1:
        raise ValueError("plan.draft_counts must be as planned with cumulative_drafts, got a buffer; replace one alone")
    for name in plan.replaced:
        tensor = getattr(plan, name)
        check_tensor(f"plan.{name}", tensor, INTEGERS, device)
        if list(tensor.shape) != [len(plan.slots)]:
            raise ValueError(f"plan.{name} must be [{len(plan.slots)}], one a slot, got {list(tensor.shape)}; slice it")
    if device.type == "cpu":
        _check_entries(plan, num_slots)


def check_counts_fit(plan: Plan, width: int) -> None:
    """Raise unless a verification has room for the drafts that an engine counts in a buffer on the CPU.

    Args:
        plan: with drafts.
        width: K of the call.

    Raises:
        ValueError: a request has more drafts.
    """
    given = _given_counts(plan)
    if given and getattr(plan, given[0]).device.type == "cpu":  # of sums, counts would be computed on the device
        _check_in_range(_name_of_counts(plan), plan.counts, -1, width, "pass as many columns of drafts")


def _check_entries(plan: Plan, num_slots: int) -> None:
    """Raise unless buffers of an engine on the CPU name slots of the table, and rows that the plan has.

    Raises:
        ValueError: an entry out of range, whose place is named; more rows than those of the plan; a request without
            rows that is no padding.
    """
    if "slot_ids" in plan.replaced:
        _check_in_range("slot_ids", plan.slot_ids, -1, num_slots - 1, "add_request() returns slots, -1 is padding")
        check_once(plan.edits, plan.slot_ids.tolist())
    if not _given_counts(plan):
        return
    name, counts, least = _name_of_counts(plan), plan.counts, -1 if plan.cumulative_drafts is None else 0
    _check_in_range(name, counts, least, MOST_DRAFTS, "a request has no more drafts")
    rows, without = int((counts + 1).sum()), (counts < 0) & (plan.slot_ids >= 0)
    if rows > plan.num_rows:
        raise ValueError(f"plan.{name} must take {plan.num_rows} rows at most, got {rows}; plan() again for more")
    if without.any():
        found = int(without.to(torch.int64).argmax())
        raise ValueError(f"plan.{name} must be >= 0 for requests, got -1 at {found}; -1 is for slots of -1")


def _given_counts(plan: Plan) -> list[str]:
    """The fields in which an engine counts drafts in a buffer of its own."""
    return [name for name in ("draft_counts", "cumulative_drafts") if name in plan.replaced]


def _name_of_counts(plan: Plan) -> str:
    return "draft_counts" if plan.cumulative_drafts is None else "cumulative_drafts, as differences,"


def _check_in_range(name: str, numbers: Tensor, least: int, largest: int, way_out: str) -> None:
    """Raise unless all numbers of a buffer are in a range; the message names the first that is not."""
    wrong = ((numbers < least) | (numbers > largest)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(f"plan.{name} must be in [{least}, {largest}], got {int(numbers[row])} at {row}; {way_out}")


def check_replaced(plan: Plan) -> None:
    """Raise unless an engine replaced nothing in a plan but the buffers that it may replace.

    Raises:
        TypeError: what tells where the plan is from is gone.
        ValueError: what was decided when the plan was made is another.
    """
    for name in plan.replaced:
        value = getattr(plan, name)
        if name in ("planned", "origin"):
            raise TypeError(f"plan.{name} must be kept, got {type(value).__name__}; sampler.plan(slots) makes a plan")
        if name not in REPLACEABLE:
            is_long = isinstance(value, Tensor | np.ndarray | Mode)  # to print a tensor may need a sync
            found = "another" if is_long else repr(value)
            raise ValueError(
                f"plan.{name} must be what plan() decided, got {found}; plan() again, since only slot_ids, "
                "draft_counts and cumulative_drafts may be replaced"
            )
