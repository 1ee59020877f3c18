"""The candidates of each row, the first C tokens of its order: the levels of ``passes/narrowing.py`` in sequence."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from compiled_sampler.core.stage import Run, call
from compiled_sampler.passes.blocks import AnyLogits
from compiled_sampler.passes.narrowing import (
    FAN_OUT,
    STORED_BLOCK,
    all_blocks,
    all_coarser,
    child_blocks,
    child_tokens,
    choose_blocks,
    choose_child_blocks,
    choose_child_tokens,
)
from compiled_sampler.passes.ranking import MOST_CHOSEN, choose, place, rank, select, sort
from compiled_sampler.pipeline.scheduling.schedule import Schedule

_FUSED: dict[Any, Callable[..., Tensor]] = {
    all_coarser: choose_blocks,
    child_blocks: choose_child_blocks,
    child_tokens: choose_child_tokens,
}
"""From stages that find the blocks of a level to stages that also choose among these blocks, in one kernel."""


def ordered_candidates(schedule: Schedule, logits: AnyLogits, keys: Tensor, run: Run = call) -> Tensor:
    """The first ``min(C, V)`` tokens of each row's order, int64 ``[R, min(C, V)]`` packed keys, in descending order."""
    found = unordered_candidates(schedule, logits, keys, run)
    return found if schedule.orders_candidates else run(sort, found, count=found.shape[1])


def unordered_candidates(schedule: Schedule, logits: AnyLogits, keys: Tensor, run: Run = call) -> Tensor:
    """The first ``min(C, V)`` tokens of each row's order, int64 ``[R, min(C, V)]`` packed (order key, id).

    They are in descending order only if ``schedule.orders_candidates``.

    Args:
        schedule: gives V, the capacity C and the block sizes of the levels.
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        keys: int32 ``[R, B]``, ``order_maxima`` of the logits in blocks of ``STORED_BLOCK``.
        run: how a stage is run.
    """
    sizes, vocab_size = schedule.levels, schedule.mode.vocab_size
    if sizes[0] >= STORED_BLOCK:
        picked = _level(schedule, run, all_coarser, keys, ratio=sizes[0] // STORED_BLOCK)
    else:
        picked = _level(schedule, run, all_blocks, logits, vocab_size=vocab_size, size=sizes[0])
    for parent, child in itertools.pairwise(sizes):
        ratio = parent // child
        if child >= STORED_BLOCK:
            picked = _level(schedule, run, child_blocks, keys, picked, ratio=ratio, size=child // STORED_BLOCK)
        else:
            blocks = {"vocab_size": vocab_size, "ratio": ratio, "size": child}
            picked = _level(schedule, run, child_tokens, logits, picked, **blocks)
    return picked


def _level(schedule: Schedule, run: Run, stage: Any, /, *tensors: AnyLogits, **static: int) -> Tensor:
    """The first ``min(C, n)`` of the n blocks of a level, int64 ``[R, min(C, n)]`` packed (key, block index).

    Finding and choosing them is one kernel where the schedule fuses levels and a block has at most ``FAN_OUT`` parts,
    two kernels elsewhere.
    """
    capacity = schedule.mode.capacity
    fused = _FUSED.get(stage) if schedule.fuses_levels else None
    if fused is not None and _num_parts(**static) <= FAN_OUT:
        return run(fused, *tensors, **static, count=capacity)
    packed = run(stage, *tensors, **static)
    return _largest(schedule, packed, min(capacity, packed.shape[1]), run)


def _num_parts(*, ratio: int, size: int | None = None, **_: int) -> int:
    """How many stored blocks or tokens the best of a block is reduced from; in the first level, ``ratio``."""
    return ratio if size is None else size


def _largest(schedule: Schedule, packed: Tensor, count: int, run: Run) -> Tensor:
    """The ``count`` largest packed keys of each row, int64 ``[R, count]``.

    ``choose`` requires ascending ids in its input and returns the keys in the order of its input, so ids stay
    ascending.
    """
    if schedule.picks_by == "select":
        return run(select, packed, count=count)
    if schedule.picks_by == "rank":
        return run(place, packed, run(rank, packed), count=count)
    if count == packed.shape[1]:
        return packed
    return run(choose if packed.shape[1] <= MOST_CHOSEN else sort, packed, count=count)
