"""Checks of a caller's plan, none of which waits for a device: its kind, its edits, and buffers of an engine in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.edits.names import EDITS, READ_POSITIONS, ROW_FILTERS, reading
from compiled_sampler.engine.boundary.tensors import INTEGERS, check_tensor
from compiled_sampler.engine.plan import REPLACEABLE, Plan, first_of
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.modes import MOST_DRAFTS, Mode
from compiled_sampler.scalars import checked_int


def padded_parents(plan: Plan, parents: Sequence[Sequence[int]], draft_token_ids: Tensor) -> Tensor:
    """The parents of trees that are on the host, as a tensor like the drafts; raise unless they are trees."""
    check_has_drafts(plan, True)
    counts = plan.num_drafts or ()
    if not _are_lists(parents) or [len(tree) for tree in parents] != [*counts]:
        raise ValueError(
            f"parents must have num_drafts={first_of(counts)} numbers for each request, got {parents!r:.200}; [-1] is "
            "one draft that follows the text"
        )
    rows = list[list[int]]()
    for request, tree in enumerate(parents):
        rows.append([checked_int(f"parents[{request}][{node}]", each, "-1 for none") for node, each in enumerate(tree)])
        for node, parent in enumerate(rows[-1]):
            if not -1 <= parent < node:
                raise ValueError(
                    f"the parent of draft {node} of request {request} must be an earlier draft or -1, got {parent}; "
                    "number drafts from the root on"
                )
    if draft_token_ids.dim() == 1:
        return torch.tensor([parent for row in rows for parent in row], dtype=torch.int64).to(draft_token_ids.device)
    width = draft_token_ids.shape[-1]
    padded = [(row + [-1] * (width - len(row)))[:width] for row in rows]
    return torch.tensor(padded, dtype=torch.int64).view(len(rows), width).to(draft_token_ids.device)


def _are_lists(parents: object) -> bool:
    return isinstance(parents, Sequence) and all(isinstance(tree, Sequence) for tree in parents)


def check_has_drafts(plan: Plan, drafts: bool) -> None:
    """Raise unless a plan was made with drafts (to verify them) or without (to sample), as ``drafts`` says."""
    if drafts and plan.num_drafts is None:
        raise ValueError("plan must say how many drafts each request has, got none; plan(slots, num_drafts=[...])")
    if not drafts and plan.num_drafts is not None:
        raise ValueError(f"plan must be without drafts, got num_drafts={plan.num_drafts}; verify() takes this one")


def check_served(own: Sequence[str], served: Sequence[str]) -> None:
    """Raise unless the edits that a plan is asked to serve have all those of its requests."""
    missing = [name for name in own if name not in served]
    if missing:
        raise ValueError(
            f"edits must have those of the requests, here {own}, got {tuple(served)} without {missing[0]!r}; "
            "add it, or edits=None for those of the requests alone"
        )


def check_once(edits: Sequence[str], slots: Sequence[int]) -> None:
    """Raise if a request stands twice with edits that read the history: its rows would write it at once."""
    held = [slot for slot in slots if slot >= 0]
    readers = reading(edits)
    if readers and len(set(held)) < len(held):
        twice = next(slot for slot in held if held.count(slot) > 1)
        raise ValueError(
            f"slots must differ with {' and '.join(readers)}, which read what a request drew, got {twice} twice; "
            "draft and verify several tokens of one request"
        )


def check_has_positions(edits: Sequence[str], positions: Tensor | None) -> None:
    """Raise unless positions are given where edits depend on them, as those of the user may."""
    placed = [name for name in edits if name in READ_POSITIONS or name not in EDITS]
    if placed and positions is None:
        raise ValueError(f"positions must be given for {' and '.join(placed)}, got None; probs(..., positions=...)")


def check_has_boundary(edits: Sequence[str], logprobs: Logprobs | None) -> None:
    """Raise if the last kept token is asked for beside filters of whole rows, whose kept set is no prefix."""
    filters = [name for name in edits if name in ROW_FILTERS]
    if filters and logprobs is not None and logprobs.boundary:
        raise ValueError(
            f"boundary must not be asked for with {' and '.join(filters)}, as the last token does not tell what is "
            "kept, got True; Logprobs(boundary=False)"
        )


def check_keeps_watermark(plan: Plan, mode: Mode, rule: str) -> None:
    """Raise if requests have a watermark, and the rule, or a draw from probabilities, has other noise."""
    if "watermark" in plan.edits and (rule != "match" or mode.from_probabilities):
        call = "verify_from_probs()" if mode.from_probabilities else f"rule {rule!r}"
        raise ValueError(f"watermark_tokens must be verified by verify(rule='match'), got {call}, of other noise")


def check_replaced(plan: Plan) -> None:
    """Raise unless an engine replaced nothing in a plan but the buffers that it may replace."""
    for name in plan.replaced:
        value = getattr(plan, name)
        if name in ("planned", "origin"):
            raise TypeError(f"plan.{name} must be kept, got {type(value).__name__}; sampler.plan(slots) makes a plan")
        if name not in REPLACEABLE:
            is_long = isinstance(value, Tensor | np.ndarray | Mode)  # to print a tensor may need a sync
            shown = "another" if is_long else repr(value)
            raise ValueError(
                f"plan.{name} must be what plan() decided, got {shown}; plan() again, since only slot_ids, "
                "draft_counts and cumulative_drafts may be replaced"
            )


def check_plan_buffers(plan: Plan, device: torch.device, num_slots: int) -> None:
    """Raise unless the buffers that an engine put into a plan are integers, one entry a slot, on the device."""
    counted = _counting_buffers(plan)
    if counted and plan.num_drafts is None:
        raise ValueError(f"plan.{counted[0]} must be None without drafts, got a buffer; plan(slots, num_drafts=[...])")
    if len(counted) > 1:
        raise ValueError("plan.draft_counts must be as planned with cumulative_drafts, got a buffer; replace one alone")
    for name in plan.replaced:
        tensor = getattr(plan, name)
        check_tensor(f"plan.{name}", tensor, INTEGERS, device)
        if list(tensor.shape) != [len(plan.slots)]:
            raise ValueError(f"plan.{name} must be [{len(plan.slots)}], one a slot, got {list(tensor.shape)}; slice it")
    if device.type != "cpu":
        return
    # on the CPU a look waits for nothing
    if "slot_ids" in plan.replaced:
        _check_in_range("slot_ids", plan.slot_ids, -1, num_slots - 1, "add_request() returns slots, -1 is padding")
        check_once(plan.edits, plan.slot_ids.tolist())
    if counted:
        _check_counts(plan)


def check_counts_fit(plan: Plan, width: int) -> None:
    """Raise unless a verification has room for the drafts that an engine counts in a buffer on the CPU."""
    counted = _counting_buffers(plan)
    if counted and getattr(plan, counted[0]).device.type == "cpu":  # of sums, counts would be computed on the device
        _check_in_range(_name_of_counts(plan), plan.counts, -1, width, "pass as many columns of drafts")


def _check_counts(plan: Plan) -> None:
    """Raise unless an engine's counts on the CPU are drafts that requests may have, and rows that the plan has."""
    name, counts, least = _name_of_counts(plan), plan.counts, -1 if plan.cumulative_drafts is None else 0
    _check_in_range(name, counts, least, MOST_DRAFTS, "a request has no more drafts")
    rows, without = int((counts + 1).sum()), (counts < 0) & (plan.slot_ids >= 0)
    if rows > plan.num_rows:
        raise ValueError(f"plan.{name} must take {plan.num_rows} rows at most, got {rows}; plan() again for more")
    if without.any():
        request = int(without.to(torch.int64).argmax())
        raise ValueError(f"plan.{name} must be >= 0 for requests, got -1 at {request}; -1 is for slots of -1")


def _counting_buffers(plan: Plan) -> list[str]:
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
