"""The draft cache: the logits of uncoupled drafts by slot and place, for handles that then hold none themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.batch import DraftTable
from compiled_sampler.core.stage import Run
from compiled_sampler.engine.plans.plan import Plan
from compiled_sampler.passes.blocks import all_rows
from compiled_sampler.speculation.row_layout import rows_of_places


class DraftCache:
    """A draft table of one size, which steps write and read in place, and what was written where, on the host.

    Args:
        num_slots: S.
        width: K, drafts of a slot.
        vocab_size: V.
        dtype: of the logits.
        device: of the sampler.

    Attributes:
        table: ``[S + 1, K, V]``; the last slot takes what padding writes.
        width: K.
    """

    def __init__(self, num_slots: int, width: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the table, filled with zeros."""
        with torch.inference_mode(False):
            self.table = DraftTable(torch.zeros(num_slots + 1, width, vocab_size, dtype=dtype, device=device))
        self.width = width
        self._count = 0
        self._written = np.zeros((num_slots + 1, width), np.int64)  # number of the last draft; padding is the last row

    @property
    def num_bytes(self) -> int:
        """Bytes of the table."""
        return self.table.logits.nbytes

    def write(self, logits: Tensor, slots: Tensor, offsets: Tensor, run: Run) -> None:
        """Put the logits of drafts to their places, on the current stream.

        Args:
            logits: ``[R, >=V]`` of the table's dtype.
            slots: int64 ``[R]``, each once; -1 for padding.
            offsets: int64 ``[R]``, in ``[0, K)``.
            run: how the rows are computed.
        """
        rows = all_rows(self.table)
        rows.index_copy_(0, run(rows_of_places, slots, offsets, self.table), logits[:, : rows.shape[1]].detach())

    def claim(self, plan: Plan, offset: int) -> int:
        """The number of a draft, from 1, which takes the places of the plan's requests at ``offset``.

        Raises:
            ValueError: a place that the cache does not have; a slot that would be written twice.
        """
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
        """Raise unless the cache still holds the drafts that a plan verifies.

        Which slots a buffer of the engine names is not known here. Then the buffer must be the one that was drafted
        with, and no later draft may have been made at the same offset, of whatever slot.

        Args:
            plan: with drafts, of the slots that were drafted for.
            drafted: the plan of each draft and its number from ``claim``, by offset; at least the plan's width.

        Raises:
            ValueError: another draft took the place of one, or a step that was compiled or captured may have.
        """
        counts = np.array(plan.num_drafts if plan.has_planned_counts else [plan.width] * len(plan.ids), np.int64)
        for offset, (before, number) in enumerate(drafted[: plan.width]):
            if plan.has_planned_slots and before.has_planned_slots:
                gone = (self._written[plan.ids, offset] != number) & (plan.ids >= 0) & (counts > offset)
            else:
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
                    f"at offset {offset} gave way to a later draft, or to warmup() or capture_seen(); draft() again"
                )

    def forget(self) -> None:
        """Hold no draft any more."""
        self._written[:] = 0
