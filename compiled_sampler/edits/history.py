"""The tokens of every request by position, which penalties, DRY, bad words, watermarks and edits of the user read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.core.order import indices
from compiled_sampler.core.stage import holds
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
    prompt_lens: Tensor  # int32 [S], the positions of the prompt; the others were drawn
    is_read: Tensor  # int32 [S], 1 for requests with an edit that reads it


class RowHistory(NamedTuple):
    """What stands before each row of trees of drafts, a text for each row: that of its request, then its path."""

    entries: Tensor  # int32 [R, 3, L], as History.entries


AnyHistory = History | RowHistory


class RowPaths(NamedTuple):
    """The drafts that each row of a tree comes behind."""

    tokens: Tensor  # int64 [R, M], in their order; UNWRITTEN for what is no token id
    starts: Tensor  # int64 [R], the position of the first
    lengths: Tensor  # int64 [R], 0..M, how many they are


def texts_of(history: AnyHistory, slots: Tensor) -> Tensor:
    """Which of ``entries`` stands before each row, int64 ``[R]``: that of its slot, or the row's own."""
    if isinstance(history, RowHistory):
        return torch.arange(slots.shape[0], device=slots.device)
    return slots.clamp(min=0)


def last_tokens(text: Tensor, positions: Tensor, history: AnyHistory, count: int, first: int | Tensor = 0) -> Tensor:
    """The tokens before each row's own, int32 ``[R, count]``, the last one last; ``UNWRITTEN`` where there is none."""
    # first, 0 or int32 [R, 1], is the position before which tokens count as none.
    most = history.entries.shape[2]
    place = positions[:, None] - count + torch.arange(count, device=positions.device)
    held = history.entries[text[:, None], TOKEN, place.clamp(0, most - 1)]
    return torch.where((place >= first) & (place < most), held, UNWRITTEN)


@holds(position_bytes=20)
def row_history(history: History, slots: Tensor, paths: RowPaths) -> RowHistory:
    """The text of each row of trees: what ``recorded`` would write of its path, in a copy of its request's entries."""
    entries, prompt_len = history.entries[slots.clamp(min=0)], history.prompt_lens[slots.clamp(min=0)][:, None]
    tokens, start = paths.tokens, paths.starts[:, None]
    place, number = indices(entries.shape[2], slots.device), torch.arange(tokens.shape[1], device=slots.device)
    is_kept = start + number < entries.shape[2]  # as in ``recorded``
    is_token = (number < paths.lengths[:, None]) & (tokens >= 0) & is_kept
    held = (
        (entries[:, TOKEN, None] == tokens[:, :, None]) & is_token[:, :, None] & (place < start)[:, None]
    )  # [R, M, L]
    earlier = torch.where(held, place, -1).amax(-1).to(torch.int64)
    same = (tokens[:, :, None] == tokens[:, None]) & is_token[:, :, None] & is_token[:, None]  # [R, M, M]
    up_to = same & (number <= number[:, None]) & (start + number >= prompt_len)[:, None]
    known = torch.where(earlier >= 0, entries[:, ORDINAL].gather(1, earlier.clamp(min=0)), 0)
    following = torch.where(same & (number > number[:, None]), (start + number)[:, None], NO_SUCCESSOR).amin(-1)
    of_path = torch.stack([torch.where(is_token, tokens, UNWRITTEN), known + up_to.sum(-1), following], 1)
    successor = torch.where(held, (start + number)[:, :, None], NO_SUCCESSOR).amin(1)
    successor = torch.where(successor < NO_SUCCESSOR, successor, entries[:, SUCCESSOR])
    before = torch.stack([entries[:, TOKEN], entries[:, ORDINAL], successor.to(torch.int32)], 1)
    offset = place - start  # [R, L]
    is_drafted = (offset >= 0) & (offset < paths.lengths[:, None])
    index = offset.clamp(0, tokens.shape[1] - 1)[:, None].expand(-1, before.shape[1], -1)
    return RowHistory(torch.where(is_drafted[:, None], of_path.to(torch.int32).gather(2, index), before))


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
