"""The tokens of every request by position, which penalties, DRY, bad words, watermarks and edits of the user read."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_sampler.edits.edit_spec import PROMPT_LEN, Column, EditSpec

UNWRITTEN = -1  # the token of a position that holds none
NO_SUCCESSOR = 2**31 - 1  # the successor of a position behind which the same token does not stand
TOKEN, ORDINAL, SUCCESSOR = range(3)  # the numbers of a position in ``History.entries``


class History(NamedTuple):
    """The tokens of every request by position, and what is known of each when it is written.

    Entries depend on earlier positions alone, so a step that is run again, or a draft that is rejected, leaves nothing
    behind: what stands at or after a row's own position is not read, and is written again before it is.
    """

    entries: Tensor
    """int32 ``[S + 1, 3, L]``; slot S takes what padding writes. By position: the token, ``UNWRITTEN`` for none; how
    many times it was drawn up to there; the next position that holds it too, ``NO_SUCCESSOR`` for none."""
    prompt_lens: Tensor
    """int32 ``[S]``, the positions of the prompt; the others were drawn."""
    is_read: Tensor
    """int32 ``[S]``, 1 for requests with an edit that reads it."""


class HistoryRows(NamedTuple):
    """All numbers of ``History.entries`` one behind the other, int32 ``[n]``: four times the same memory.

    A record writes four numbers of a token. What is written into one argument is written one behind the other, each in
    a kernel of its own; what is written into four is written at once.
    """

    token: Tensor  # for the tokens
    ordinal: Tensor  # for how many times they were drawn
    successor: Tensor  # for the positions that hold them next
    before: Tensor  # for the successors of the positions that held them last


READS_HISTORY = Column(lambda params, row: row.reads_history, off=None)
HISTORY_EDIT = EditSpec(
    name="history",
    kind="history",
    columns={"prompt_lens": PROMPT_LEN, "is_read": READS_HISTORY},
    reads_history=True,
)
"""What stands among the edits of a batch whose requests have an edit of the user that reads the history."""
