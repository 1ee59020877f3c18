"""The first tokens of a row's order, level by level: the stages of ``narrowing.py`` in their order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from compiled_sampler.core.order import is_on_gpu
from compiled_sampler.core.stage import Run, call
from compiled_sampler.modes import Mode, are_chosen_at_once, are_few
from compiled_sampler.passes.choosing import choose_blocks, choose_child_blocks, choose_child_tokens
from compiled_sampler.passes.narrowing import (
    FAN_OUT,
    STORED_BLOCK,
    all_blocks,
    all_coarser,
    block_sizes,
    child_blocks,
    child_tokens,
)
from compiled_sampler.passes.ranking import MOST_CHOSEN, choose, place, rank, sort
from compiled_sampler.passes.selection import select

Level = Callable[..., Tensor]
"""Runs a stage that finds blocks, on its arguments, and picks the first of them."""

_CHOOSING: dict[Any, Callable[..., Tensor]] = {
    all_coarser: choose_blocks,
    child_blocks: choose_child_blocks,
    child_tokens: choose_child_tokens,
}
"""Stages that find blocks, and those that choose among them too."""


def first_of_order(mode: Mode, logits: Tensor, keys: Tensor, run: Run = call) -> Tensor:
    """``first_tokens`` in descending order."""
    found = first_tokens(mode, logits, keys, run)
    return found if is_ordered(logits) else run(sort, found, count=found.shape[1])


def first_tokens(mode: Mode, logits: Tensor, keys: Tensor, run: Run = call) -> Tensor:
    """The first ``min(capacity, V)`` tokens of each row's order; in descending order if ``is_ordered`` says so.

    Args:
        mode: gives V and the capacity C.
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        keys: int32 ``[R, B]``, ``order_maxima`` of the logits in blocks of ``STORED_BLOCK``.
        run: how a stage is run.

    Returns:
        int64 ``[R, min(C, V)]``, packed (order key, id).
    """
    sizes, level = block_sizes(logits, mode.vocab_size), _level(mode, logits, run)
    if sizes[0] >= STORED_BLOCK:
        picked = level(all_coarser, keys, ratio=sizes[0] // STORED_BLOCK)
    else:
        picked = level(all_blocks, logits, vocab_size=mode.vocab_size, size=sizes[0])
    for parent, child in itertools.pairwise(sizes):
        ratio = parent // child
        if child >= STORED_BLOCK:
            picked = level(child_blocks, keys, picked, ratio=ratio, size=child // STORED_BLOCK)
        else:
            picked = level(child_tokens, logits, picked, vocab_size=mode.vocab_size, ratio=ratio, size=child)
    return picked


def is_ordered(logits: Tensor) -> bool:
    """Whether ``first_tokens`` are in descending order: not those of many rows on a GPU."""
    return not is_on_gpu(logits) or are_few(logits.shape[0], logits.device)


def _level(mode: Mode, logits: Tensor, run: Run) -> Level:
    """How a level is run: in one kernel where rows are many and blocks have few parts, or found and picked apart."""
    shape = (logits.shape[0], mode.vocab_size)
    at_once = are_chosen_at_once(*shape, beside_a_pass=mode.searches or mode.base_is_row)
    at_once = at_once and not is_ordered(logits) and mode.capacity * FAN_OUT <= MOST_CHOSEN

    def level(stage: Any, /, *tensors: Tensor, **static: int) -> Tensor:
        choosing = _CHOOSING.get(stage) if at_once else None
        if choosing is not None and _num_parts(**static) <= FAN_OUT:
            return run(choosing, *tensors, **static, count=mode.capacity)
        packed = run(stage, *tensors, **static)
        return _largest(packed, min(mode.capacity, packed.shape[1]), run)

    return level


def _num_parts(*, ratio: int, size: int | None = None, **_: int) -> int:
    """Stored blocks, or tokens, that a block's best is found from; of the first level's blocks ``ratio``."""
    return ratio if size is None else size


def _largest(packed: Tensor, count: int, run: Run) -> Tensor:
    """The ``count`` largest packed keys of each row, by what is fastest for so many on the device.

    Choosing, which asks for ascending ids, keeps them so.
    """
    if not is_on_gpu(packed):
        return run(select, packed, count=count)
    if are_few(packed.shape[0], packed.device):
        return run(place, packed, run(rank, packed), count=count)
    if count == packed.shape[1]:
        return packed
    return run(choose if packed.shape[1] <= MOST_CHOSEN else sort, packed, count=count)
