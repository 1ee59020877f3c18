"""Calls of a sampler for batches of hard rows, in another order and among padding, and what differs."""

from collections.abc import Callable

import torch
from torch import Tensor

from compiled_sampler import SampleOutputs, Sampler
from compiled_sampler.batch import tensors_of
from tests.cases.hard_rows import Batch

Path = Callable[[Batch, str], SampleOutputs]


def direct(sampler: Sampler, forced: str | None = None) -> Path:
    """One call for the whole batch; a forced mode replaces the one asked for."""

    def run(batch: Batch, mode: str) -> SampleOutputs:
        plan = sampler.plan(batch.slots.tolist(), forced or mode)
        out = sampler.sample(plan, batch.logits.to(sampler.device), batch.positions.to(sampler.device))
        return SampleOutputs(*(each.cpu() for each in tensors_of(out)))

    return run


def arranged(batch: Batch, padding: int, seed: int) -> tuple[Batch, Tensor]:
    """The rows in another order, and where each went; padding between them has logits and positions of other rows."""
    rows = len(batch.slots)
    order = torch.randperm(rows + padding, generator=torch.Generator().manual_seed(seed))
    slots = torch.cat([batch.slots, torch.full((padding,), -1)])
    source = order % rows
    return Batch(batch.logits[source], slots[order], batch.positions[source]), order.argsort()


def num_mismatches(wanted: SampleOutputs, found: SampleOutputs, places: Tensor) -> int:
    """Rows of ``found``, which is arranged, whose token or status differs, and padding rows that are not -1."""
    wrong = torch.zeros(len(places), dtype=torch.bool)
    for want, have in zip(tensors_of(wanted), tensors_of(found), strict=True):
        padding = torch.full((len(places) - len(want),), -1, dtype=want.dtype)
        wrong |= torch.cat([want, padding]) != have[places]
    return int(wrong.sum())
