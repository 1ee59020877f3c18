"""Edits of logits, in one place: before temperature, for sampling, drafting, probabilities and verification.

The first stage copies the rows in float32, with masked tokens at -inf. Each later one returns a few tokens of every
row with their new logits, which are written into the copy, so that the next one reads them. All later passes read the
copy; the caller's logits are not written, unless the caller allows it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import Run
from compiled_sampler.edit_tables import EditInputs, EditTables
from compiled_sampler.edits.lists import biased, without_bad_words, without_stops
from compiled_sampler.edits.masks import copied, masked_by_both, masked_by_row, masked_by_slot
from compiled_sampler.edits.penalties import penalized
from compiled_sampler.pipeline.schedule import Schedule


def edited_logits(
    schedule: Schedule, logits: Tensor, row_slots: RowSlots, given: EditInputs | None, run: Run
) -> Tensor:
    """The logits ``[R, >=V]`` after all edits in their order, which every later stage reads.

    Args:
        schedule: gives the stages of the user, which come last; the masks then act once more.
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        row_slots: ``[R]``, the request and the position of each row.
        given: what the library's own edits read; without it and without stages the logits are returned as they are.
        run: how a stage is run.
    """
    if given is not None:
        logits = _with_lists(_copied(logits, row_slots, given, schedule, run), row_slots, given.tables, run)
    for edit in schedule.edits:
        logits = run(edit, logits, row_slots, vocab_size=schedule.mode.vocab_size)
    is_masked = given is not None and not (given.token_bitmask is None and given.tables.allowed is None)
    return _copied(logits, row_slots, given, schedule, run) if is_masked and given and schedule.edits else logits


def _copied(logits: Tensor, row_slots: RowSlots, given: EditInputs, schedule: Schedule, run: Run) -> Tensor:
    """The logits after the masks, float32 ``[R, V]``, in new memory unless the caller's may be written."""
    vocab, mask, allowed = {"vocab_size": schedule.mode.vocab_size}, given.token_bitmask, given.tables.allowed
    if given.in_place and mask is None and allowed is None and logits.dtype is torch.float32:
        return logits[:, : schedule.mode.vocab_size]
    if mask is not None and allowed is not None:
        return run(masked_by_both, logits, mask, row_slots.slots, allowed, **vocab)
    if mask is not None:
        return run(masked_by_row, logits, mask, **vocab)
    if allowed is not None:
        return run(masked_by_slot, logits, row_slots.slots, allowed, **vocab)
    return run(copied, logits, **vocab)


def _with_lists(x: Tensor, row_slots: RowSlots, tables: EditTables, run: Run) -> Tensor:
    """``x``, float32 ``[R, V]``, after the edits of a few tokens of each row are written into it."""
    slots, positions = row_slots.slots, row_slots.positions
    if tables.bias is not None:
        x.scatter_(1, *run(biased, x, slots, tables.bias))
    if tables.stops is not None:
        x.scatter_(1, *run(without_stops, x, slots, positions, tables.stops))
    if tables.penalties is not None:
        x.scatter_(1, *run(penalized, x, slots, positions, tables.penalties, tables.history))
    if tables.words is not None:
        x.scatter_(1, *run(without_bad_words, x, slots, positions, tables.words, tables.history))
    return x
