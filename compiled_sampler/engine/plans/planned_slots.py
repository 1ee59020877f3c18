"""The slots of a batch as numbers, with the plans that were made of them while no request came or went."""

from __future__ import annotations

from typing import Any

from compiled_sampler.engine.requests.slots import SlotState


class PlannedSlots:
    """Slots that plans are made of; they stay known while requests come and go.

    Args:
        slots: of a batch; -1 is padding.
        words: the same, as ``words_of_slots``.

    Attributes:
        slots, words: as given.
        epoch: of the requests that ``needs`` and ``plans`` are of; -1 before ``renew``.
        needs: see ``SlotState.uncovered``.
        plans: by the name of a mode that was forced, and by the words of the numbers of drafts.
    """

    __slots__ = ("epoch", "needs", "plans", "slots", "words")

    def __init__(self, slots: tuple[int, ...], words: bytes) -> None:
        """Know no request."""
        self.slots, self.words = slots, words
        self.epoch, self.needs = -1, 0
        self.plans: dict[Any, Any] = {}

    def renew(self, state: SlotState) -> None:
        """Read what the requests need that hold the slots now, and forget the plans of those before.

        Raises:
            ValueError: a row names a slot without a request.
        """
        self.needs = state.uncovered(self.slots, self.words)
        self.plans.clear()
        self.epoch = state.epoch
