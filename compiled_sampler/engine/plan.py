"""Plans: which mode serves a batch; decided on the host from the parameters alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from compiled_sampler.modes import Mode, uncovered
from compiled_sampler.params import SamplingParams


@dataclass(frozen=True, eq=False)
class Plan:
    """A batch of rows and the mode that serves it; reusable while its requests stay."""

    slots: tuple[int, ...]
    """The slot of each row, or with drafts of each request; -1 is padding."""
    mode: Mode
    slot_ids: Tensor = field(repr=False)
    """int64 ``[R]``, with drafts ``[N]``, on the device, shared by all who hold this plan: never written.

    An engine that captures a graph of its own reads its own buffer: ``dataclasses.replace(plan, slot_ids=buffer)``.
    """
    num_drafts: tuple[int, ...] | None
    """Drafts of each request, which has so many rows and one; None for a plan that verifies nothing."""
    draft_counts: Tensor | None = field(repr=False)
    """int64 ``[N]`` on the device, ``num_drafts``; shared and replaced like ``slot_ids``."""
    drafted: Tensor | None = field(repr=False)
    """int64 ``[D]`` on the device, ``request * width + offset`` of each draft; None where all have ``width``."""
    planned: tuple[Tensor, Tensor | None] = field(repr=False)
    """``slot_ids`` and ``draft_counts`` as they were planned; an engine may have put its own in their place."""
    generations: tuple[int, ...] = field(repr=False)
    """How often each row's slot had changed hands when the plan was made."""
    owner: object = field(repr=False)
    """What tells the sampler that made the plan from any other."""
    epoch: int = field(repr=False)
    """The sampler's count of requests that came and went when the plan was made."""

    @property
    def has_planned_slots(self) -> bool:
        """Whether ``slot_ids`` are those of ``slots``, and not a buffer of the engine."""
        return self.slot_ids is self.planned[0]

    @property
    def has_planned_counts(self) -> bool:
        """Whether ``draft_counts`` are ``num_drafts``, and not a buffer of the engine."""
        return self.draft_counts is self.planned[1]

    @cached_property
    def num_rows(self) -> int:
        """R."""
        return len(self.slots) + self.num_proposals

    @cached_property
    def num_proposals(self) -> int:
        """D, drafts of all requests."""
        return sum(self.num_drafts or ())

    @cached_property
    def width(self) -> int:
        """The most drafts that a request of the plan has."""
        return max(self.num_drafts or (), default=0)


def covering_mode(modes: Sequence[Mode], needs: int) -> Mode:
    """The cheapest mode that covers a batch.

    Args:
        modes: cheapest first.
        needs: bit i is set where mode i does not cover the batch.
    """
    return next(mode for i, mode in enumerate(modes) if not needs >> i & 1)


def forced_mode(
    modes: Sequence[Mode], name: str, needs: int, slots: Sequence[int], params: Sequence[SamplingParams | None]
) -> Mode:
    """The mode of that name, or the cheapest of a family (``top_k_top_p`` for ``top_k_top_p[64]``), if it covers.

    Args:
        modes: cheapest first.
        name: of a mode or a family.
        needs: bit i is set where mode i does not cover the batch.
        slots: the slot of each row; -1 is padding.
        params: by slot.

    Raises:
        ValueError: no such mode, or it does not cover a row; the message says which and why.
    """
    family = [i for i, mode in enumerate(modes) if name in (mode.name, mode.name.partition("[")[0])]
    if not family:
        raise ValueError(f"mode must be one of {', '.join(mode.name for mode in modes)}, got {name!r}; None chooses")
    for i in family:
        if not needs >> i & 1:
            return modes[i]
    mode = modes[family[-1]]
    for row, slot in enumerate(slots):
        request = params[slot] if slot >= 0 else None
        reason = uncovered(mode, request) if request else None
        if reason:
            raise ValueError(f"mode {mode.name} does not cover row {row} (slot {slot}): {reason}; mode=None chooses")
    raise AssertionError("needs and uncovered() disagree")
