"""Plans: a batch of requests and the mode that serves it, chosen on the host from the parameters alone; their checks.

No check of a caller's plan waits for a device: its kind, its edits, and buffers of an engine in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.edits.names import EDITS, READ_POSITIONS, ROW_FILTERS, reading
from compiled_sampler.engine.boundary.arguments import numbers_of
from compiled_sampler.engine.boundary.tensors import INTEGERS, check_tensor
from compiled_sampler.engine.requests.slots import SlotState
from compiled_sampler.engine.requests.uploads import PlannedTensors, room
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.modes import MOST_DRAFTS, Mode
from compiled_sampler.scalars import checked_int

REPLACEABLE = "slot_ids", "draft_counts", "cumulative_drafts"
"""The fields of a plan that an engine may replace; the last one is the other form of ``draft_counts``."""
DECIDED = "slots", "mode", "num_drafts", "edits", "inexact"
"""The fields of a plan that the sampler decided."""
_MOST_SHOWN = 8  # numbers of a batch that a plan prints


class PlanOrigin(NamedTuple):
    """The sampler that made a plan, and what it decided."""

    owner: SlotState
    """The requests of the sampler."""
    epoch: int
    """The sampler's count of added and removed requests when the plan was made."""
    words: bytes
    """The slots as ``words_of_slots``."""
    decided: tuple[Any, ...]
    """The fields ``DECIDED`` of the plan, so that a plan in which one was replaced is found out."""

    def gone(self) -> np.ndarray:
        """Whether the request of each row ``[R]`` was removed since, as bools; never for padding."""
        return self.owner.changed_since(self.epoch, numbers_of(self.words))

    def has_requests_of(self, other: PlanOrigin) -> bool:
        """Whether the requests of this plan are those of another one of the same slots, which are all still held."""
        return self.owner is other.owner and (self.epoch == self.owner.epoch or not self.gone().any())


# A plan from ``Plan.of`` lacks two fields: the first read of one uploads the planned numbers, and sets it. A
# dataclass leaves defaults on its class, where a cached property answers for what an instance lacks.
_UPLOADED_SLOTS: Any = cached_property(lambda plan: plan.planned.there["slots"])
_UPLOADED_COUNTS: Any = cached_property(lambda plan: plan.planned.there.get("num_drafts"))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Plan:
    """A batch and the mode that serves it, from ``Sampler.plan``; reusable while its requests are held.

    An engine that captures a graph of its own may let it read the engine's buffers instead of the tensors that were
    planned: ``dataclasses.replace(plan, slot_ids=buffer)``, and with drafts either ``draft_counts=buffer`` or
    ``cumulative_drafts=buffer``, of int64 or int32. Nothing else may be replaced.

    What such a buffer holds is the engine's duty on a GPU, because a look at it would wait for the device; on the CPU
    numbers out of range are a ValueError of the call. ``slot_ids``: slots of held requests, each once if ``edits`` read
    the history; or -1. A request that ``mode`` does not cover, or with an edit that is not among ``edits``, draws
    nothing and gets ``RowStatus.NOT_COVERED``, in every call alike. A slot that no
    request holds draws with what its table entry holds. A slot of S or more is out of bounds: on CUDA a device-side
    assertion, after which the process cannot use CUDA. ``draft_counts``: 0 to K of the call, or -1 for padding without
    rows, and no more rows in all than ``num_rows``; on a GPU others give wrong tokens and counts.
    ``cumulative_drafts``: the same counts as sums, which never fall; so padding has a row of logits, and no draft.
    """

    slots: tuple[int, ...]
    """The slot of each row, with drafts of each request; -1 is padding."""
    mode: Mode
    """The mode that serves the batch."""
    num_drafts: tuple[int, ...] | None
    """The number k_n of drafts of each request, which has k_n + 1 rows of logits; None for a plan without drafts."""
    planned: PlannedTensors
    """``slot_ids`` and ``draft_counts`` as they were planned, by the names of the inputs of a step."""
    origin: PlanOrigin
    """The sampler and the requests that the plan was made for."""
    edits: tuple[str, ...] = ()
    """The names of the edits that its steps serve, of ``edits.names.EDITS`` and those that the user wrote."""
    inexact: tuple[str, ...] = ()
    """Those of them that do not promise equal bits on every path (``LogitEdit.bit_exact``)."""
    slot_ids: Tensor = _UPLOADED_SLOTS
    """int64 ``[R]``, with drafts ``[N]``, on the device: ``slots``. Shared by holders of the plan, never written."""
    draft_counts: Tensor | None = _UPLOADED_COUNTS
    """int64 ``[N]`` on the device: ``num_drafts``. Shared like ``slot_ids``; None without drafts."""
    cumulative_drafts: Tensor | None = None
    """``[N]`` on the device, the drafts of requests 0 to n, that of n included; None unless an engine replaced it."""

    @classmethod
    def of(cls, origin: PlanOrigin, planned: PlannedTensors, num_proposals: int, width: int) -> Plan:
        """A new plan, without ``slot_ids`` and ``draft_counts``, which are uploaded when they are read."""
        # an initialiser that sets one frozen field after another would take twice as long as all else
        plan, (slots, mode, num_drafts, edits, inexact) = object.__new__(cls), origin.decided
        fields = {
            "slots": slots, "mode": mode, "num_drafts": num_drafts, "edits": edits, "inexact": inexact,
            "planned": planned, "origin": origin, "cumulative_drafts": None, "held_at": origin.epoch,
            "replaced": (), "slot_buffers": (), "num_proposals": num_proposals, "width": width,
            "num_rows": len(slots) + num_proposals,
        }  # fmt: skip
        object.__setattr__(plan, "__dict__", fields)
        return plan

    def __repr__(self) -> str:
        """The mode, and the sizes and the first entries of the batch; no tensor is printed, which may need a wait."""
        drafts = "" if self.num_drafts is None else f", num_drafts={first_of(self.num_drafts)}"
        changed = f", replaced={self.replaced}" if self.replaced else ""
        mode = self.mode.name if isinstance(self.mode, Mode) else type(self.mode).__name__
        edits = f", edits={self.edits}" if self.edits else ""
        edits += f", not_bit_exact={self.inexact}" if self.inexact else ""
        return f"Plan(mode={mode!r}, slots={first_of(self.slots)}{drafts}{edits}{changed})"

    @cached_property
    def replaced(self) -> tuple[str, ...]:
        """The names of the fields that are not what the sampler put there."""
        if not isinstance(self.origin, PlanOrigin):
            return ("origin",)
        if not isinstance(self.planned, PlannedTensors):
            return ("planned",)
        decided = [
            name for name, value in zip(DECIDED, self.origin.decided, strict=True) if getattr(self, name) is not value
        ]
        buffers = []
        for field, name in (("slot_ids", "slots"), ("draft_counts", "num_drafts")):
            tensor = self.__dict__[field]
            is_absent = tensor is None and name not in self.planned.host
            if not (is_absent or self.planned.holds(name, tensor)):
                buffers.append(field)
        summed = () if self.cumulative_drafts is None else ("cumulative_drafts",)
        return (*decided, *buffers, *summed)

    @property
    def has_planned_slots(self) -> bool:
        """Whether ``slot_ids`` is the planned tensor and not a buffer of the engine."""
        return "slot_ids" not in self.replaced

    @cached_property
    def slot_buffers(self) -> tuple[Tensor, ...]:
        """``slot_ids`` where an engine replaced it by a buffer of its own."""
        return () if self.has_planned_slots else (self.slot_ids,)

    @property
    def has_planned_counts(self) -> bool:
        """Whether no buffer of the engine counts drafts; true without drafts."""
        return "draft_counts" not in self.replaced and self.cumulative_drafts is None

    @cached_property
    def held_at(self) -> int:
        """The last epoch of the sampler's requests at which those of the plan are known to have been held."""
        return self.origin.epoch

    @cached_property
    def ids(self) -> np.ndarray:
        """int64 ``[R]``, with drafts ``[N]``, on the host: ``slots``."""
        return numbers_of(self.origin.words)

    @property
    def counts(self) -> Any:
        """Drafts of each request ``[N]`` on the device; of sums, the differences in a new tensor each time."""
        if self.cumulative_drafts is None:
            return self.draft_counts
        differences = self.cumulative_drafts.clone()
        differences[1:] -= self.cumulative_drafts[:-1]
        return differences

    def inputs(self, with_counts: bool, on_host: bool) -> dict[str, Any]:
        """The slots, and the drafts of each request if wanted: on the device, or bytes of the host where planned."""
        host = self.planned.host
        if not self.replaced and with_counts == ("num_drafts" in host):
            return host if on_host else self.planned.there
        inputs: dict[str, Any] = {"slots": host["slots"] if on_host and self.has_planned_slots else self.slot_ids}
        if with_counts and self.cumulative_drafts is None:  # else the call brings them: a route is of one tensor
            inputs["num_drafts"] = host["num_drafts"] if on_host and self.has_planned_counts else self.draft_counts
        return inputs

    @property
    def device_tensors(self) -> list[Tensor]:
        """The tensors of the plan that are on the device now: buffers of the engine, and planned ones once uploaded."""
        return [*(getattr(self, name) for name in self.replaced if name in REPLACEABLE), *self.planned.uploaded]

    @cached_property
    def drafted(self) -> Tensor | None:
        """int64 ``[D]`` on the device, ``request * width + offset`` of each draft; None if all have ``width``."""
        index, count = drafted_ids(np.array(self.num_drafts or (), np.int64)), len(self.slots)
        if index is None:
            return None
        return self.planned.beside({"drafted": index.tobytes()}, room(count, count)).there["drafted"]

    @cached_property
    def padded(self) -> Tensor:
        """int64 ``[N * K]`` on the device, for K = ``width`` places of each request which of the D drafts is there."""
        index, count = padded_ids(np.array(self.num_drafts or (), np.int64)), len(self.slots)
        return self.planned.beside({"padded": index.tobytes()}, room(count, count, self.num_proposals)).there["padded"]

    @cached_property
    def has_equal_counts(self) -> bool:
        """Whether all requests have ``width`` drafts, and no buffer of the engine says otherwise."""
        return self.has_planned_counts and self.num_proposals == len(self.slots) * self.width

    @cached_property
    def repeats_slots(self) -> bool:
        """Whether two requests have one slot, padding aside."""
        held = self.ids[self.ids >= 0]
        return len(np.unique(held)) < len(held)

    @cached_property
    def num_rows(self) -> int:
        """R, rows of logits: one a slot, and one more for each draft."""
        return len(self.slots) + self.num_proposals

    @cached_property
    def first_rows(self) -> tuple[int, ...]:
        """The first row of logits of each request, N numbers; request n has the rows up to ``+ num_drafts[n]``.

        Without drafts, request n has row n alone. With ``draft_counts`` of the engine, its rows are where that says.
        """
        counts = (0 for _ in self.slots) if self.num_drafts is None else self.num_drafts
        return tuple(accumulate((count + 1 for count in counts), initial=0))[:-1]

    @cached_property
    def num_proposals(self) -> int:
        """D, drafts of all requests."""
        return sum(self.num_drafts or ())

    @cached_property
    def width(self) -> int:
        """The largest number of drafts of a request; 0 without drafts."""
        return max(self.num_drafts or (), default=0)


def first_of(numbers: Sequence[int]) -> str:
    """The first numbers of a tuple, and how many there are; of anything else its type."""
    if not isinstance(numbers, tuple) or len(numbers) <= _MOST_SHOWN:
        return repr(numbers) if isinstance(numbers, tuple) else type(numbers).__name__
    return f"({', '.join(map(repr, numbers[:_MOST_SHOWN]))}, ... {len(numbers)} in all)"


# These two repeat ``drafted`` and ``padded`` of ``speculation.row_layout``, which read counts on the device. On the
# host numpy takes 6 to 12 us (8 to 128 requests), torch on the CPU 33 to 66 us, a GPU a launch for each operation.
def drafted_ids(counts: np.ndarray) -> np.ndarray | None:
    """``Plan.drafted`` of these numbers of drafts ``[N]``."""
    width = int(counts.max(initial=0))
    if (counts == width).all():
        return None
    ends = counts.cumsum()
    first: np.ndarray = np.repeat(np.arange(len(counts)) * width - (ends - counts), counts)
    return first + np.arange(ends[-1])


def padded_ids(counts: np.ndarray) -> np.ndarray:
    """``Plan.padded`` of these numbers of drafts ``[N]``, not all 0; any draft where a request has none."""
    ends = counts.cumsum()
    index: np.ndarray = (ends - counts)[:, None] + np.arange(counts.max(initial=0))
    return index.clip(max=ends[-1] - 1).ravel()


def padded_parents(plan: Plan, parents: Sequence[Sequence[int]], draft_token_ids: Tensor) -> Tensor:
    """The parents of trees that are on the host, as a tensor like the drafts; raise unless they are trees."""
    check_has_drafts(plan, True)
    counts = plan.num_drafts or ()
    are_lists = isinstance(parents, Sequence) and all(isinstance(tree, Sequence) for tree in parents)
    if not are_lists or [len(tree) for tree in parents] != [*counts]:
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
