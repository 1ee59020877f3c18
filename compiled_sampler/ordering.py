"""The first tokens of a row's order, level by level: the stages of ``narrowing.py`` in their order."""

from __future__ import annotations

import itertools

from torch import Tensor

from compiled_sampler.modes import Mode, are_few
from compiled_sampler.narrowing import STORED_BLOCK, all_blocks, all_coarser, block_sizes, child_blocks, child_tokens
from compiled_sampler.order import is_on_gpu
from compiled_sampler.ranking import MOST_CHOSEN, choose, place, rank, sort
from compiled_sampler.selection import select
from compiled_sampler.stage import Run, call


def first_of_order(mode: Mode, logits: Tensor, keys: Tensor, run: Run = call) -> Tensor:
    """The first ``min(capacity, V)`` tokens of each row's order.

    Args:
        mode: gives V and the capacity C.
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        keys: int32 ``[R, B]``, ``order_maxima`` of the logits in blocks of ``STORED_BLOCK``.
        run: how a stage is run.

    Returns:
        int64 ``[R, min(C, V)]``, packed (order key, id) in descending order.
    """
    sizes = block_sizes(logits, mode.vocab_size)
    if sizes[0] >= STORED_BLOCK:
        packed = run(all_coarser, keys, ratio=sizes[0] // STORED_BLOCK)
    else:
        packed = run(all_blocks, logits, vocab_size=mode.vocab_size, size=sizes[0])
    for parent, child in itertools.pairwise(sizes):
        picked = _largest(packed, min(mode.capacity, packed.shape[1]), run, in_order=False)
        if child >= STORED_BLOCK:
            packed = run(child_blocks, keys, picked, ratio=parent // child, size=child // STORED_BLOCK)
        else:
            packed = run(child_tokens, logits, picked, vocab_size=mode.vocab_size, ratio=parent // child, size=child)
    return _largest(packed, min(mode.capacity, mode.vocab_size), run, in_order=True)


def _largest(packed: Tensor, count: int, run: Run, *, in_order: bool) -> Tensor:
    """The ``count`` largest packed keys of each row, by what is fastest for so many on the device.

    Descending if ``in_order``; else in any order. Choosing, which asks for ascending ids, keeps them so.
    """
    if not is_on_gpu(packed):
        return run(select, packed, count=count)
    if are_few(packed.shape[0], packed.device):
        return run(place, packed, run(rank, packed), count=count)
    if count < packed.shape[1] <= MOST_CHOSEN:
        packed = run(choose, packed, count=count)
    return run(sort, packed, count=count) if in_order or packed.shape[1] > count else packed
