"""The whole algorithm: a sampling step as a list of stages, for each mode.

Every ``run(stage, ...)`` is a point where results are written to memory. Eager code calls the stage;
``lowering.CompiledStages`` compiles each stage apart; a CUDA graph then records all of them. The list, and so the
result, is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor

from compiled_sampler.batch import Rows, SampleInputs, SampleOutputs
from compiled_sampler.blocks import largest_magnitude, order_maxima, row_maximum
from compiled_sampler.draw import (
    draw_from_blocks,
    draw_from_candidates,
    first_from_blocks,
    race_maxima,
)
from compiled_sampler.modes import LARGE_ROWS, SMALL_ROWS, Mode, row_class
from compiled_sampler.narrowing import (
    STORED_BLOCK,
    all_blocks,
    all_coarser,
    block_sizes,
    child_blocks,
    child_tokens,
    pick,
    rank,
    sort,
)
from compiled_sampler.noise import TARGET
from compiled_sampler.rows import gather_rows
from compiled_sampler.wide import block_masses, candidate_maximum, known_threshold, wide_threshold

_BLOCKS = {1: 256, SMALL_ROWS: 64, LARGE_ROWS: 128}
"""Tokens a block where a pass over the row keeps one result a block, by class of row counts; measured, not derived."""

Result = TypeVar("Result")


class Run(Protocol):
    """Calls a stage on tensors; keyword arguments are static."""

    def __call__(self, stage: Callable[..., Result], /, *tensors: Any, **static: Any) -> Result:
        """Call ``stage(*tensors, **static)`` in one way or another."""
        ...


def call(stage: Callable[..., Result], /, *tensors: Any, **static: Any) -> Result:
    """Run a stage as it is, in eager torch."""
    return stage(*tensors, **static)


def sample_step(mode: Mode, inputs: SampleInputs, run: Run = call) -> SampleOutputs:
    """Draw one token for every row.

    Args:
        mode: what the step can do; it must cover the parameters of every row (``modes.uncovered``).
        inputs: logits, slots, positions and the slot table.
        run: how a stage is run; the result does not depend on it.

    Returns:
        Tokens and status ``[R]``.
    """
    logits = inputs.logits
    if not mode.draws:
        blocks = run(order_maxima, logits, **_cut(mode, logits))
        return run(first_from_blocks, logits, blocks, inputs.slots, **_cut(mode, logits))
    rows = run(gather_rows, inputs.table, inputs.slots, inputs.positions, stream=TARGET)
    if mode.capacity:
        return _draw_ordered(mode, logits, rows, run)
    row_max = None
    if mode.filters_min_p:
        row_max = run(row_maximum, run(order_maxima, logits, **_cut(mode, logits)).keys)
    return _draw_whole(mode, logits, rows, row_max, None, run)


def _draw_whole(
    mode: Mode, logits: Tensor, rows: Rows, row_max: Tensor | None, threshold: Tensor | None, run: Run
) -> SampleOutputs:
    """Race over the whole row."""
    blocked = _cut(mode, logits)
    blocks = run(race_maxima, logits, rows, row_max, threshold, **blocked)
    return run(draw_from_blocks, logits, blocks, rows, row_max, threshold, **blocked)


def _draw_ordered(mode: Mode, logits: Tensor, rows: Rows, run: Run) -> SampleOutputs:
    """Filter the first ``capacity`` tokens of the order; race among them, or over the row where it may need more."""
    blocks = run(order_maxima, logits, vocab_size=mode.vocab_size, block=STORED_BLOCK)
    ordered = first_of_order(mode, logits, blocks.keys, run)
    row_max, masses = None, None
    if mode.wide or mode.base_is_row:
        row_max = run(candidate_maximum, ordered)
        masses = run(block_masses, logits, row_max, rows.scale, **_cut(mode, logits))
    if not mode.wide:
        return run(draw_from_candidates, ordered, run(largest_magnitude, blocks.magnitudes), rows, masses)
    base = {"vocab_size": mode.vocab_size, "base_is_row": mode.base_is_row}
    threshold = run(wide_threshold, logits, run(known_threshold, ordered, rows, masses, **base), rows, **base)
    return _draw_whole(mode, logits, rows, row_max, threshold, run)


def _cut(mode: Mode, logits: Tensor) -> dict[str, int]:
    """The static arguments of a pass over the row in blocks."""
    return {"vocab_size": mode.vocab_size, "block": _BLOCKS[row_class(logits.shape[0], logits.device)]}


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
    sizes = block_sizes(mode.vocab_size)
    if sizes[0] >= STORED_BLOCK:
        packed = run(all_coarser, keys, ratio=sizes[0] // STORED_BLOCK)
    else:
        packed = run(all_blocks, logits, vocab_size=mode.vocab_size, size=sizes[0])
    for parent, child in itertools.pairwise(sizes):
        picked = _largest(packed, min(mode.capacity, packed.shape[1]), run)
        if child >= STORED_BLOCK:
            packed = run(child_blocks, keys, picked, ratio=parent // child, size=child // STORED_BLOCK)
        else:
            packed = run(child_tokens, logits, picked, vocab_size=mode.vocab_size, ratio=parent // child, size=child)
    return _largest(packed, min(mode.capacity, mode.vocab_size), run)


def _largest(packed: Tensor, count: int, run: Run) -> Tensor:
    """The ``count`` largest packed keys of each row, descending: sorted, or ranked where that is faster."""
    if packed.shape[0] == 1 and packed.is_cuda:
        return run(pick, packed, run(rank, packed), count=count)
    return run(sort, packed, count=count)
