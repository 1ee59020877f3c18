"""The names of edits: of a batch, of the steps that are captured for it, and of what comes with a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

HISTORY = "history"
"""What stands among the edits of a batch whose requests have an edit of the user that reads the history."""

HISTORY_EDITS = ("penalties", "dry", "bad_words", "watermark", HISTORY)
"""Edits that read the history, so that a step with one of them records its tokens."""

HISTORY_LISTS = ("penalties", "dry", "bad_words")
"""Those of them that write a few tokens of each row."""

RESTORE: Literal["restore"] = "restore"
Leave = bool | Literal["restore"]
"""Whether edits may write into the caller's logits, and if so whether the end of the step undoes that."""

MASK, CONSUMES, RESTORES = "token_bitmask", "consume_logits", "restore_logits"
"""What comes with a call and is no parameter of a request: a mask, and leave to write into the caller's logits, which
then hold nothing of use, or which the end of the step restores."""

ROW_FILTERS = ("top_n_sigma", "min_k", "p_less", "typical_p", "xtc")
"""Filters that look at a whole row, in the order in which they act: behind all edits, also those of the user."""

_OF_CALL = CONSUMES, RESTORES, MASK
EDITS = (*_OF_CALL, "allowed_token_ids", "logit_bias", "min_tokens", *HISTORY_EDITS, "stops", *ROW_FILTERS)
"""The names of the library's edits in the order in which they act. The first two, and those from the watermark to the
stops, change no logit.

Behind them stand the names of the user's edits, which a sampler has of its own; row filters act last."""

GIVEN = "edit_inputs."
"""What the names of tensors that edits of the user get with a call begin with, among the inputs of a step."""


def writes_lists(edits: Sequence[str]) -> bool:
    """Whether a step with these edits writes lists of tokens, if it may into the caller's logits."""
    return any(name in edits for name in ("logit_bias", "min_tokens", *HISTORY_LISTS))


def reading(edits: Sequence[str]) -> list[str]:
    """The edits among these that read the history."""
    return [name for name in edits if name in HISTORY_EDITS]
