"""The whole algorithm: a sampling step as a list of stages, for each mode.

Every ``run(stage, ...)`` is a point where results are written to memory. Eager code calls the stage; ``lowering.compiled``
compiles each stage apart; a CUDA graph then records all of them. The list, and so the result, is the same.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from compiled_sampler.batch import BlockMaxima, Rows, SampleInputs, SampleOutputs
from compiled_sampler.blocks import best_block, coarser_maxima, largest_magnitude, order_maxima, row_maximum
from compiled_sampler.draw import draw_from_block, draw_from_candidates, first_from_block, race_maxima
from compiled_sampler.modes import Mode
from compiled_sampler.narrowing import STORED_BLOCK, all_blocks, block_sizes, child_blocks, child_tokens, number, pick, rank, sort
from compiled_sampler.noise import TARGET
from compiled_sampler.rows import gather_rows
from compiled_sampler.wide import block_masses, candidate_maximum, known_threshold, wide_threshold

BLOCK = 128
"""Tokens a block where a pass over the row keeps one result a block."""


class Run(Protocol):
    """Calls a stage on tensors; keyword arguments are static."""

    def __call__(self, stage: Any, /, *tensors: Any, **static: Any) -> Any: ...


def call(stage: Any, /, *tensors: Any, **static: Any) -> Any:
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
    size = {"vocab_size": mode.vocab_size}
    blocked = {**size, "block": BLOCK}
    logits = inputs.logits
    if not mode.draws:
        blocks = run(order_maxima, logits, **blocked)
        return run(first_from_block, logits, run(best_block, blocks), inputs.slots, **blocked)
    rows = run(gather_rows, inputs.table, inputs.slots, inputs.positions, stream=TARGET)
    if mode.capacity:
        return _draw_ordered(mode, logits, rows, run)
    row_max = None
    if mode.filters_min_p:
        row_max = run(row_maximum, run(order_maxima, logits, **blocked).keys)
    return _draw_whole(mode, logits, rows, row_max, None, run)


def _draw_whole(
    mode: Mode, logits: Tensor, rows: Rows, row_max: Tensor | None, threshold: Tensor | None, run: Run
) -> SampleOutputs:
    """Race over the whole row, in blocks."""
    blocked = {"vocab_size": mode.vocab_size, "block": BLOCK}
    blocks = run(race_maxima, logits, rows, row_max, threshold, **blocked)
    return run(draw_from_block, logits, run(best_block, blocks), rows, row_max, threshold, **blocked)


def _draw_ordered(mode: Mode, logits: Tensor, rows: Rows, run: Run) -> SampleOutputs:
    """Filter the first ``capacity`` tokens of the order; race among them, or over the row where it may need more."""
    blocks = run(order_maxima, logits, vocab_size=mode.vocab_size, block=STORED_BLOCK)
    ordered = first_of_order(mode, logits, blocks, run)
    base = {"vocab_size": mode.vocab_size, "base_is_row": mode.base_is_row}
    if not (mode.wide or mode.base_is_row):
        magnitude = run(largest_magnitude, blocks.magnitudes)
        return run(draw_from_candidates, ordered, magnitude, rows, None)
    row_max = run(candidate_maximum, ordered)
    masses = run(block_masses, logits, row_max, rows.scale, vocab_size=mode.vocab_size, block=BLOCK)
    if not mode.wide:
        magnitude = run(largest_magnitude, blocks.magnitudes)
        return run(draw_from_candidates, ordered, magnitude, rows, masses)
    known = run(known_threshold, ordered, rows, masses, **base)
    threshold = run(wide_threshold, logits, known, rows, **base)
    return _draw_whole(mode, logits, rows, row_max, threshold, run)


def first_of_order(mode: Mode, logits: Tensor, blocks: BlockMaxima, run: Run = call) -> Tensor:
    """The first ``min(capacity, V)`` tokens of each row's order.

    Args:
        mode: gives V and the capacity C.
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        blocks: ``order_maxima`` of the logits in blocks of ``STORED_BLOCK``.
        run: how a stage is run.

    Returns:
        int64 ``[R, min(C, V)]``, packed (order key, id) in descending order.
    """
    sizes = block_sizes(mode.vocab_size)
    stored = {STORED_BLOCK: blocks.keys}
    for size in sorted(size for size in sizes if size > STORED_BLOCK):
        stored[size] = run(coarser_maxima, blocks.keys, ratio=size // STORED_BLOCK)
    if sizes[0] < STORED_BLOCK:
        packed = run(all_blocks, logits, vocab_size=mode.vocab_size, size=sizes[0])
    else:
        packed = run(number, stored[sizes[0]])
    for parent, child in zip(sizes, sizes[1:], strict=False):
        picked = _largest(packed, min(mode.capacity, packed.shape[1]), run)
        if child in stored:
            packed = run(child_blocks, stored[child], picked, ratio=parent // child)
        else:
            packed = run(child_tokens, logits, picked, vocab_size=mode.vocab_size, ratio=parent // child, size=child)
    return _largest(packed, min(mode.capacity, mode.vocab_size), run)


def _largest(packed: Tensor, count: int, run: Run) -> Tensor:
    """The ``count`` largest packed keys of each row, descending: sorted, or ranked where that is faster."""
    if packed.shape[0] == 1 and packed.is_cuda:
        return run(pick, packed, run(rank, packed), count=count)
    return run(sort, packed, count=count)
