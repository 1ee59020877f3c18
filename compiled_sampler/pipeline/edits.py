"""Edits of logits, in one place: before temperature, for sampling, drafting, probabilities and verification.

The first stage copies the rows in float32, with masks in the copy. Biases, penalties, stops, DRY and bad words write a
few tokens of every row into the copy. The edits of the user are one pass more, with the masks before and after them;
where no list comes before, that pass makes the copy. Filters that look at whole rows come last, each of which writes a
copy of its own. All later passes read the last copy. Where rows are picked from more, the pass that makes the copy does
so.

Where the caller lets its logits be written, lists come first, and write there: what a mask hides is hidden as well
afterwards. The pass that applies the masks then makes the copy, if one is made. The last stage undoes what was written,
if the caller asks for it.

On a GPU, a pass over all tokens that is the last edit tells the block maxima of its copy too where these come next.

On a GPU no copy is made for a draw with masks and no other edit, but for logprobs of what a search keeps: its passes
read the masks. Nor is one made with lists besides that may write into the caller's logits.

Stops are masked behind the penalties, which is as good as before them: neither a bias nor a penalty lifts -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import EditedOutputs, PickedRows, SampleInputs
from compiled_sampler.core.rows import RowSlots, row_slots_of
from compiled_sampler.core.stage import Run, call
from compiled_sampler.edits.changes import take_back
from compiled_sampler.edits.custom import customized
from compiled_sampler.edits.history import History, row_history
from compiled_sampler.edits.masks import MaskedLogits, copied, masked, row_words
from compiled_sampler.edits.names import RESTORE
from compiled_sampler.edits.tables import EditInputs, EditTables
from compiled_sampler.logprobs import LogprobInputs
from compiled_sampler.modes import Mode
from compiled_sampler.passes.blocks import AnyLogits
from compiled_sampler.passes.maxima import BlockMaxima, customized_with_maxima, masked_with_maxima
from compiled_sampler.pipeline.chunks import in_chunks, in_chunks_as
from compiled_sampler.pipeline.row_filters import filtered_logits
from compiled_sampler.pipeline.schedule import Schedule, StepRun, schedule_for


class Edited(NamedTuple):
    """Logits to draw from, and what the pass that copied them told about them."""

    logits: AnyLogits
    """After all edits; or before masks, which then stand beside them."""
    maxima: BlockMaxima | None
    """Of the blocks of ``Schedule.copied``; None unless the last edit was a pass that found them."""


def edited_step(mode: Mode, inputs: SampleInputs, run: Run = call) -> EditedOutputs:
    """The logits that every filter and draw of ``sample_step`` reads, float32 ``[R, V]`` in new memory."""
    run, row_slots = step_run(mode, inputs, run), row_slots_of(inputs)

    def edited_chunk(logits: Tensor, row_slots: RowSlots, edits: EditInputs | None) -> Tensor:
        edited = edited_logits(run, logits, row_slots, edits)
        return run(copied, edited, **run.vocab) if edited is logits else edited

    return EditedOutputs(in_chunks(run, edited_chunk, inputs.logits, row_slots, inputs.edits))


def step_run(mode: Mode, inputs: SampleInputs, run: Run) -> StepRun:
    """How a step other than a draw runs its stages."""
    logits = inputs.logits
    return StepRun(run, schedule_for(mode, logits.shape[0], logits.device, is_edited=inputs.edits is not None))


def drawing_schedule(
    mode: Mode, logits: Tensor, edits: EditInputs | None, logprobs: LogprobInputs | None = None
) -> Schedule:
    """The schedule of a draw from logits ``[R, >=V]``, which reads masks, if it can, where no edit needs a copy."""
    # Logprobs that read what a mode's search keeps need a copy: the search of their law reads no masks.
    has_masks = edits is not None and _is_masked(edits) and _needs_no_copy(logits, edits)
    has_masks = has_masks and not (mode.searches and logprobs is not None and logprobs.wanted.reads_filters)
    return schedule_for(mode, logits.shape[0], logits.device, is_edited=edits is not None, has_masks=has_masks)


def logits_to_draw_from(
    run: StepRun, logits: Tensor, row_slots: RowSlots, edits: EditInputs | None, undo: ExitStack
) -> Edited:
    """``edited_logits``, or by a ``drawing_schedule`` that reads masks, the logits as they are and these masks."""
    edits = _with_texts(edits, row_slots, run)
    if edits is None or not run.schedule.reads_masks:
        return _edited(run, logits, row_slots, edits, undo, with_maxima=run.schedule.copies_with_maxima)
    masks = edits.token_bitmask, row_slots.slots, edits.tables.allowed
    if has_lists(edits.tables):
        logits = _listed_in_place(run, logits, row_slots, edits, undo)
    return Edited(MaskedLogits(logits, *masks), None)


def with_one_mask(run: StepRun, logits: MaskedLogits) -> MaskedLogits:
    """The logits with one mask of the call beside them, which has the bits of both masks."""
    if logits.allowed is None:
        return logits
    masks = logits.token_bitmask, logits.slots, logits.allowed
    return MaskedLogits(logits.logits, run(row_words, *masks, **run.vocab), logits.slots, None)


def makes_copy(logits: Tensor, edits: EditInputs) -> bool:
    """Whether ``edited_logits`` writes rows in new memory, rather than into those of the caller."""
    is_copied = edits.custom is not None or edits.tables.filters is not None or _is_masked(edits)
    return is_copied or not _may_write(logits, edits)


def edited_logits(
    run: StepRun,
    logits: Tensor | PickedRows,
    row_slots: RowSlots,
    edits: EditInputs | None,
    undo: ExitStack | None = None,
) -> Tensor:
    """The logits ``[R, >=V]`` after all edits in their order, which every later stage reads."""
    # undo is closed after the last stage that reads them; None where the edits restore nothing.
    edited, _ = _edited(run, logits, row_slots, _with_texts(edits, row_slots, run), undo, with_maxima=False)
    assert isinstance(edited, Tensor)
    return edited


def _with_texts(edits: EditInputs | None, row_slots: RowSlots, run: Run) -> EditInputs | None:
    """The edits with a text for each row of trees, which every edit reads instead of the history."""
    history, paths = (None, None) if edits is None else (edits.tables.history, edits.paths)
    if edits is None or paths is None or not isinstance(history, History):
        return edits
    texts = run(row_history, history, row_slots.slots, paths)
    return edits._replace(tables=edits.tables._replace(history=texts), paths=None)


def _edited(
    run: StepRun,
    logits: Tensor | PickedRows,
    row_slots: RowSlots,
    edits: EditInputs | None,
    undo: ExitStack | None,
    *,
    with_maxima: bool,
) -> Edited:
    """``edited_logits``; ``with_maxima`` those of their blocks too, where the last edit is a pass over all tokens."""
    if edits is None:
        assert isinstance(logits, Tensor)  # rows are picked for edits alone, the first of which copies them
        return Edited(logits, None)
    filters, maxima, wanted = edits.tables.filters, None, None
    if with_maxima and filters is None:
        wanted = {**run.schedule.copied.reduction, "names": run.schedule.by_triton and not run.mode.draws}
    is_listed, is_copied_later = has_lists(edits.tables), _is_copied_later(logits, edits)
    if is_listed and isinstance(logits, Tensor) and _may_write(logits, edits):
        logits = _listed_in_place(run, logits, row_slots, edits, undo)
        if _is_masked(edits) and not is_copied_later:
            logits, maxima = _copied(run, logits, row_slots, edits, wanted)
    elif is_listed:
        logits, _ = _copied(run, logits, row_slots, edits, None)
        write_lists(logits, row_slots, edits.tables, run)
    elif not is_copied_later:
        logits, maxima = _copied(run, logits, row_slots, edits, wanted)
    if edits.custom is not None:
        logits, maxima = _customized(run, logits, row_slots, edits, wanted)
    assert isinstance(logits, Tensor)
    return Edited(logits if filters is None else filtered_logits(run, logits, row_slots, filters), maxima)


def _listed_in_place(
    run: StepRun, logits: Tensor, row_slots: RowSlots, edits: EditInputs, undo: ExitStack | None
) -> Tensor:
    """The caller's logits ``[R, V]``, in which lists are written now; ``undo`` takes that back, if it is asked for."""
    restores = edits.leave == RESTORE
    assert not (restores and undo is None)
    x = logits[:, : run.mode.vocab_size]
    write_lists(x, row_slots, edits.tables, run, undo if restores else None)
    return x


def _copied(
    run: StepRun, logits: Tensor | PickedRows, row_slots: RowSlots, edits: EditInputs, wanted: dict[str, Any] | None
) -> tuple[Tensor, BlockMaxima | None]:
    """The logits after the masks, float32 ``[R, V]`` in new memory, and the maxima that are wanted, if masks act."""
    if _is_masked(edits):
        masks = edits.token_bitmask, row_slots.slots, edits.tables.allowed
        if wanted is None:
            return run(masked, logits, *masks, **run.vocab), None
        return run(masked_with_maxima, logits, *masks, **wanted)
    return run(copied, logits, **run.vocab), None


def _is_masked(edits: EditInputs) -> bool:
    """Whether a mask of the call or of a request acts."""
    return edits.token_bitmask is not None or edits.tables.allowed is not None


def _needs_no_copy(logits: Tensor, edits: EditInputs) -> bool:
    """Whether masks are the only edits, or such besides that write into the caller's logits."""
    if edits.custom is not None or edits.tables.filters is not None:
        return False
    return not has_lists(edits.tables) or _may_write(logits, edits)


def _is_copied_later(logits: Tensor | PickedRows, edits: EditInputs) -> bool:
    """Whether a later pass makes the copy: that of the edits of the user, or without masks a filter of whole rows."""
    # Filters read rows more than once, so picked rows are copied before them.
    if edits.custom is not None:
        return True
    return edits.tables.filters is not None and not _is_masked(edits) and isinstance(logits, Tensor)


def _customized(
    run: StepRun, logits: Tensor | PickedRows, row_slots: RowSlots, edits: EditInputs, wanted: dict[str, Any] | None
) -> tuple[Tensor, BlockMaxima | None]:
    """The logits after the edits of the user and the masks, float32 ``[R, V]``, and the maxima that are wanted."""
    tables = edits.tables
    masks = edits.token_bitmask, row_slots.slots, row_slots.positions, tables.allowed
    read = *masks, tables.custom, edits.given, tables.history
    if wanted is None:
        return run(customized, logits, *read, edits=edits.custom, **run.vocab), None
    return run(customized_with_maxima, logits, *read, edits=edits.custom, **wanted)


def _may_write(logits: Tensor, edits: EditInputs) -> bool:
    return bool(edits.leave) and logits.dtype is torch.float32


def has_lists(tables: EditTables) -> bool:
    """Whether an edit writes a few tokens of each row."""
    return bool(tables.lists)


def write_lists(x: Tensor, row_slots: RowSlots, tables: EditTables, run: Run, undo: ExitStack | None = None) -> None:
    """Write the lists into float32 logits ``[R, V]``; ``undo`` takes a call for each that gives the bits back."""
    writer = _Writer(x, run, undo)
    for table in tables.lists:
        table.write(writer, row_slots.slots, row_slots.positions, tables.history)


class _Writer:
    """Writes one list after the other into logits, float32 ``[R, V]``; arguments as in ``write_lists``."""

    def __init__(self, x: Tensor, run: Run, undo: ExitStack | None) -> None:
        self._x, self._bits, self._run, self._undo = x, x.view(torch.int32), run, undo

    def add(self, stage: Callable[..., Any], *read: Any) -> None:
        """Run a stage that adds to the bits of logits."""
        static = {"vocab_size": self._x.shape[1], "tells": self._undo is not None}
        added = self._run(stage, self._x, self._bits, *read, **static)
        if self._undo is not None:
            self._undo.callback(self._run, take_back, self._bits, added)

    def put(self, stage: Callable[..., Any], *read: Any, smallest: bool = False) -> None:
        """Write values of tokens ``[R, n]``, of a token that comes again the smallest one or the same each time."""

        def put_chunk(x: Tensor, *read: Any) -> None:
            token_ids, values = self._run(stage, x, *read)
            if self._undo is not None:
                self._undo.callback(x.scatter_, 1, token_ids, x.gather(1, token_ids))
            if smallest:
                x.scatter_reduce_(1, token_ids, values, "amin")
            else:
                x.scatter_(1, token_ids, values)

        in_chunks_as(stage, self._run, put_chunk, self._x, *read)
