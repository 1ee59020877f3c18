"""Plans: a batch of requests and the mode that serves it, chosen on the host from the parameters alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from compiled_sampler.engine.boundary.arguments import numbers_of
from compiled_sampler.engine.requests.slots import SlotState
from compiled_sampler.engine.requests.uploads import PlannedTensors, room
from compiled_sampler.modes import Mode

REPLACEABLE = "slot_ids", "draft_counts", "cumulative_drafts"
"""The fields of a plan that an engine may replace; the last one is the other form of ``draft_counts``."""
_MOST_SHOWN = 8  # numbers of a batch that a plan prints


class PlanOrigin(NamedTuple):
    """The sampler that made a plan, the requests that it was made for, and what was decided for them."""

    owner: SlotState
    """The requests of the sampler."""
    epoch: int
    """The sampler's count of added and removed requests when the plan was made."""
    words: bytes
    """The slots as ``words_of_slots``."""
    slots: tuple[int, ...]
    mode: Mode
    num_drafts: tuple[int, ...] | None
    edits: tuple[str, ...]
    inexact: tuple[str, ...]

    def gone(self) -> np.ndarray:
        """Whether the request of each row ``[R]`` was removed since, as bools; never for padding."""
        return self.owner.changed_since(self.epoch, numbers_of(self.words))

    def has_requests_of(self, other: PlanOrigin) -> bool:
        """Whether the requests of this plan are those of another one of the same slots, which are all still held."""
        return self.owner is other.owner and (self.epoch == self.owner.epoch or not self.gone().any())


_DECIDED = PlanOrigin._fields[3:]  # fields of a plan too, so that a plan in which one was replaced is found out
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
        _, epoch, _, slots, mode, num_drafts, edits, inexact = origin
        # an initialiser that sets one frozen field after another would take twice as long as all else
        plan = object.__new__(cls)
        fields = {
            "slots": slots, "mode": mode, "num_drafts": num_drafts, "planned": planned, "origin": origin,
            "edits": edits, "inexact": inexact, "cumulative_drafts": None, "replaced": (),
            "num_proposals": num_proposals, "width": width, "num_rows": len(slots) + num_proposals, "held_at": epoch,
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
        decided = [name for name in _DECIDED if getattr(self, name) is not getattr(self.origin, name)]
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

    @property
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
