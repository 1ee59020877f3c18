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
from compiled_sampler.engine.plans.draft_places import drafted_ids, padded_ids
from compiled_sampler.engine.requests.slots import SlotState
from compiled_sampler.engine.requests.uploads import PlannedTensors, room
from compiled_sampler.modes import Mode

_MOST_SHOWN = 8  # numbers of a batch that a plan prints


class PlanOrigin(NamedTuple):
    """The sampler that made a plan, the requests that it was made for, and what was decided for them.

    An engine must not replace any of what was decided.
    """

    owner: SlotState
    """The requests of the sampler."""
    epoch: int
    """The sampler's count of added and removed requests when the plan was made."""
    slots: tuple[int, ...]
    """``Plan.slots``."""
    words: bytes
    """The slots as ``words_of_slots``."""
    mode: Mode
    """``Plan.mode``."""
    num_drafts: tuple[int, ...] | None
    """``Plan.num_drafts``."""
    edits: tuple[str, ...]
    """``Plan.edits``."""
    inexact: tuple[str, ...]
    """``Plan.inexact``."""

    def gone(self) -> np.ndarray:
        """Whether the request of each row ``[R]`` was removed since, as bools; never for padding."""
        return self.owner.changed_since(self.epoch, numbers_of(self.words))

    def has_requests_of(self, other: PlanOrigin) -> bool:
        """Whether the requests of this plan are those of another one of the same slots, which are all still held."""
        return self.owner is other.owner and (self.epoch == self.owner.epoch or not self.gone().any())


DECIDED = "slots", "mode", "num_drafts", "edits", "inexact"
"""The fields of a plan that its origin has too."""
PLANNED = frozenset(("slots",)), frozenset(("slots", "num_drafts"))
"""The inputs of a step that a plan brings, without and with drafts."""
BUFFERS = {"slot_ids": "slots", "draft_counts": "num_drafts"}
"""The fields of a plan that an engine may replace by buffers, and the input of a step that each is."""
REPLACEABLE = (*BUFFERS, "cumulative_drafts")
"""All fields that an engine may replace; the last one is the other form of ``draft_counts``."""


class Replaceable:
    """A field of a plan that an engine may replace by a buffer: until then the planned tensor on the device."""

    def __set_name__(self, kind: type, field: str) -> None:
        """Keep the name of the field."""
        self._field = field

    def __get__(self, plan: Plan | None, kind: type) -> Any:
        """The tensor; without a plan the default of the field, which stands for the planned tensor."""
        value = AS_PLANNED if plan is None else plan.__dict__[self._field]
        return plan.planned.there.get(BUFFERS[self._field]) if plan is not None and value is AS_PLANNED else value

    def __set__(self, plan: Plan, value: object) -> None:
        """Set it, once, as the plan is made."""
        plan.__dict__[self._field] = value


AS_PLANNED: Any = object()
"""What a field holds that was not replaced."""
_SLOT_IDS: Any = Replaceable()
_DRAFT_COUNTS: Any = Replaceable()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Plan:
    """A batch and the mode that serves it, from ``Sampler.plan``; reusable while its requests are held.

    An engine that captures a graph of its own may let it read the engine's buffers instead of the tensors that were
    planned: ``dataclasses.replace(plan, slot_ids=buffer)``, and with drafts either ``draft_counts=buffer`` or
    ``cumulative_drafts=buffer``, of int64 or int32. Nothing else may be replaced.

    What such a buffer holds is the engine's duty on a GPU, because a look at it would wait for the device; on the CPU
    numbers out of range are a ValueError of the call. ``slot_ids``: slots of held requests, each once if ``edits`` read
    the history; or -1. A request that ``mode`` does not cover, or with an edit that is not among ``edits``, draws
    nothing and gets ``RowStatus.NOT_COVERED``, in every call alike: no step with more edits, nor of a wider mode, runs
    instead. A slot that no
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
    """The names of the edits that its steps serve, of ``edit_names.EDITS`` and those that the user wrote."""
    inexact: tuple[str, ...] = ()
    """Those of them that do not promise equal bits on every path (``LogitEdit.bit_exact``)."""
    slot_ids: Tensor = _SLOT_IDS
    """int64 ``[R]``, with drafts ``[N]``, on the device: ``slots``. Shared by holders of the plan, never written."""
    draft_counts: Tensor | None = _DRAFT_COUNTS
    """int64 ``[N]`` on the device: ``num_drafts``. Shared like ``slot_ids``; None without drafts."""
    cumulative_drafts: Tensor | None = None
    """``[N]`` on the device, the drafts of requests 0 to n, that of n included; None unless an engine replaced it."""

    @classmethod
    def of(cls, origin: PlanOrigin, planned: PlannedTensors, num_proposals: int, width: int) -> Plan:
        """A new plan. An initialiser that sets one frozen field after another would take twice as long as all else.

        Args:
            origin: with what was decided.
            planned: its numbers.
            num_proposals: D.
            width: the largest number of drafts of a request.
        """
        _, epoch, slots, _, mode, num_drafts, edits, inexact = origin
        made = object.__new__(cls)
        fields = {
            "slots": slots, "mode": mode, "num_drafts": num_drafts, "planned": planned, "origin": origin,
            "edits": edits, "inexact": inexact, "slot_ids": AS_PLANNED, "draft_counts": AS_PLANNED,
            "cumulative_drafts": None, "replaced": (), "constant": PLANNED[num_drafts is not None],
            "num_proposals": num_proposals, "width": width, "num_rows": len(slots) + num_proposals, "held_at": epoch,
        }  # fmt: skip
        object.__setattr__(made, "__dict__", fields)
        return made

    @cached_property
    def ids(self) -> np.ndarray:
        """int64 ``[R]``, with drafts ``[N]``, on the host: ``slots``."""
        return numbers_of(self.origin.words)

    @cached_property
    def held_at(self) -> int:
        """The last epoch of the sampler's requests at which those of the plan are known to have been held."""
        return self.origin.epoch

    @cached_property
    def replaced(self) -> tuple[str, ...]:
        """The names of the fields that are not what the sampler put there."""
        if not isinstance(self.origin, PlanOrigin):
            return ("origin",)
        if not isinstance(self.planned, PlannedTensors):
            return ("planned",)
        names = [name for name in DECIDED if getattr(self, name) is not getattr(self.origin, name)]
        summed = () if self.cumulative_drafts is None else ("cumulative_drafts",)
        return (*names, *(field for field in BUFFERS if not self._is_planned(field)), *summed)

    def __repr__(self) -> str:
        """The mode, and the sizes and the first entries of the batch; no tensor is printed, which may need a wait."""
        drafts = "" if self.num_drafts is None else f", num_drafts={_first_of(self.num_drafts)}"
        changed = f", replaced={self.replaced}" if self.replaced else ""
        mode = self.mode.name if isinstance(self.mode, Mode) else type(self.mode).__name__
        edits = f", edits={self.edits}" if self.edits else ""
        edits += f", not_bit_exact={self.inexact}" if self.inexact else ""
        return f"Plan(mode={mode!r}, slots={_first_of(self.slots)}{drafts}{edits}{changed})"

    @property
    def brings_slots(self) -> bool:
        """Whether an engine may name other requests at each step, by a buffer of its own."""
        return "slot_ids" in self.replaced

    @property
    def has_planned_slots(self) -> bool:
        """Whether ``slot_ids`` is the planned tensor and not a buffer of the engine."""
        return self._is_planned("slot_ids")

    @property
    def has_planned_counts(self) -> bool:
        """Whether ``draft_counts`` is the planned tensor, or None without drafts, and no buffer of the engine."""
        return self.cumulative_drafts is None and self._is_planned("draft_counts")

    @property
    def counts(self) -> Any:
        """Drafts of each request ``[N]`` by a buffer of the engine; of sums, the differences in a new tensor."""
        if self.cumulative_drafts is None:
            return self.__dict__["draft_counts"]
        made = self.cumulative_drafts.clone()
        made[1:] -= self.cumulative_drafts[:-1]
        return made

    def _is_planned(self, field: str) -> bool:
        name, value = BUFFERS[field], self.__dict__[field]
        is_absent = value is None and name not in self.planned.host
        return value is AS_PLANNED or is_absent or self.planned.holds(name, value)

    @cached_property
    def constant(self) -> frozenset[str]:
        """The names of the inputs of a step that are planned tensors, which nobody writes."""
        kept = {"slots": self.has_planned_slots, "num_drafts": self.has_planned_counts}
        return frozenset(name for name in self.planned.host if kept[name])

    def inputs(self, names: frozenset[str], on_host: bool) -> dict[str, Any]:
        """The inputs of a step that the plan brings: tensors on the device, or bytes of the host where planned.

        Args:
            names: ``slots``, ``num_drafts``.
            on_host: whether bytes are wanted of those that were planned.
        """
        constant = self.constant
        planned: Any = {} if not constant else self.planned.host if on_host else self.planned.there
        if names == constant and not self.replaced:  # else a buffer stands for some of what the host knows, too
            return planned  # type: ignore[no-any-return]
        return {name: planned[name] if name in constant else self._buffer(name) for name in names}

    def _buffer(self, name: str) -> Any:
        return self.__dict__["slot_ids"] if name == "slots" else self.counts

    @property
    def device_tensors(self) -> list[Tensor]:
        """The tensors of the plan that are on the device now: buffers of the engine, and planned ones once uploaded."""
        return [*(getattr(self, name) for name in self.replaced if name in REPLACEABLE), *self.planned.uploaded]

    @property
    def drafted(self) -> Tensor | None:
        """int64 ``[D]`` on the device, ``request * width + offset`` of each draft; None if all have ``width``."""
        return None if self._drafted is None else self._drafted.there["drafted"]

    @cached_property
    def _drafted(self) -> PlannedTensors | None:
        index, count = drafted_ids(np.array(self.num_drafts or (), np.int64)), len(self.slots)
        return None if index is None else self.planned.beside({"drafted": index.tobytes()}, room(count, count))

    @cached_property
    def has_equal_counts(self) -> bool:
        """Whether all requests have ``width`` drafts, and no buffer of the engine says otherwise."""
        return self.has_planned_counts and self.num_proposals == len(self.slots) * self.width

    @property
    def padded(self) -> Tensor:
        """int64 ``[N * K]`` on the device, for K = ``width`` places of each request which of the D drafts is there."""
        return self._padded.there["padded"]

    @cached_property
    def _padded(self) -> PlannedTensors:
        index, count = padded_ids(np.array(self.num_drafts or (), np.int64)), len(self.slots)
        return self.planned.beside({"padded": index.tobytes()}, room(count, count, self.num_proposals))

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


def _first_of(numbers: Sequence[int]) -> str:
    """The first numbers of a tuple, and how many there are; of anything else its type."""
    if not isinstance(numbers, tuple) or len(numbers) <= _MOST_SHOWN:
        return repr(numbers) if isinstance(numbers, tuple) else type(numbers).__name__
    return f"({', '.join(map(repr, numbers[:_MOST_SHOWN]))}, ... {len(numbers)} in all)"
