"""The slots of a batch as numbers, with the plans that were made of them while no request came or went."""

from __future__ import annotations

from typing import Any

from compiled_sampler.engine.requests.slots import SlotState, slot_array


class PlannedSlots:
    """Slots that plans are made of; their array stays the same while requests come and go, so that none is sent twice.

    Args:
        slots: of a batch; -1 is padding.

    Attributes:
        slots: as given.
        ids: int64 ``[R]``, the same on the host.
        epoch: of the requests that ``needs`` and ``plans`` are of; -1 before ``renew``.
        needs: see ``SlotState.uncovered``.
        plans: by the name of a mode that was forced, and by the numbers of drafts.

    Raises:
        ValueError: a number beyond 64 bits, which is no slot.
    """

    __slots__ = ("epoch", "ids", "needs", "plans", "slots")

    def __init__(self, slots: tuple[int, ...]) -> None:
        """Know no request."""
        self.slots, self.ids = slots, slot_array(slots)
        self.epoch, self.needs = -1, 0
        self.plans: dict[Any, Any] = {}

    def renew(self, state: SlotState) -> None:
        """Read what the requests need that hold the slots now, and forget the plans of those before.

        Raises:
            ValueError: a row names a slot without a request.
        """
        self.needs = state.uncovered(self.ids)
        self.plans.clear()
        self.epoch = state.epoch
