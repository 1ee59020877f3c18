"""The names of edits: of a batch, of the steps that are captured for it, and of what comes with a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from compiled_sampler.edits import EDIT_SPECS
from compiled_sampler.edits.history import HISTORY_EDIT

HISTORY = HISTORY_EDIT.name
"""What stands among the edits of a batch whose requests have an edit of the user that reads the history."""

HISTORY_EDITS = tuple(spec.name for spec in EDIT_SPECS if spec.reads_history)
"""Edits that read the history, so that a step with one of them records its tokens."""

RESTORE: Literal["restore"] = "restore"
Leave = bool | Literal["restore"]
"""Whether edits may write into the caller's logits, and if so whether the end of the step undoes that."""

MASK, CONSUMES, RESTORES = "token_bitmask", "consume_logits", "restore_logits"
"""What comes with a call and is no parameter of a request: a mask, and leave to write into the caller's logits, which
then hold nothing of use, or which the end of the step restores."""

LEAVES = CONSUMES, RESTORES  # of these, what a call has at most one of

ROW_FILTERS = tuple(spec.name for spec in EDIT_SPECS if spec.kind == "filter")
"""Filters that look at a whole row, in the order in which they act: behind all edits, also those of the user."""

EDITS = (*LEAVES, MASK, *(spec.name for spec in EDIT_SPECS))
"""The names of the library's edits in the order in which they act. Behind them stand the names of the user's edits,
which a sampler has of its own; row filters act last."""

SILENT = (*LEAVES, *(spec.name for spec in EDIT_SPECS if spec.kind in ("noise", "history", "end")))
"""Those that change no logit."""

READ_POSITIONS = tuple(spec.name for spec in EDIT_SPECS if spec.reads_history or spec.reads_positions)
"""Those that depend on the position of a row."""

GIVEN = "edit_inputs."
"""What the names of tensors that edits of the user get with a call begin with, among the inputs of a step."""


def writes_lists(edits: Sequence[str]) -> bool:
    """Whether a step with these edits writes lists of tokens, if it may into the caller's logits."""
    return any(spec.name in edits for spec in EDIT_SPECS if spec.kind == "list")


def without_vain_leave(edits: tuple[str, ...], *, reads_raw: bool, by_row: bool) -> tuple[str, ...]:
    """The edits without leave to write into the logits that is of no use to a step with them."""
    is_listed = writes_lists(edits)
    if is_listed and not reads_raw:
        return edits
    # Logprobs of raw logits need them restored before they are read, which is done only where each row draws a token.
    vain = {CONSUMES} if is_listed and by_row else {*LEAVES}
    return tuple(name for name in edits if name not in vain)


def reading(edits: Sequence[str]) -> list[str]:
    """The edits among these that read the history."""
    return [name for name in edits if name in HISTORY_EDITS]
