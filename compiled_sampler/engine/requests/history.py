"""The history of a sampler: the tokens of its requests by position, written in place by steps and by the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.edits.history import TOKEN, UNWRITTEN, History, HistoryRows
from compiled_sampler.edits.recording import entries_of, recorded, write_record
from compiled_sampler.engine.requests.uploads import send_rows, sent

_AT_ONCE = 64  # tokens of one request that are recorded together; work grows with their square


class TokenHistory:
    """A history of one size, which steps read and write in place."""

    def __init__(self, num_slots: int, length: int, prompt_lens: Tensor, is_read: Tensor, device: torch.device) -> None:
        # prompt_lens and is_read, int32 [S], are written by the owner.
        with torch.inference_mode(False):
            entries = sent(entries_of((), 0, length), device).repeat(num_slots + 1, 1, 1)
        # entries [S + 1, 3, L]; the last slot takes what padding writes
        self.table = History(entries, prompt_lens, is_read)

    @property
    def memory(self) -> tuple[History, HistoryRows]:
        """The history to read, and its numbers in one row to write: the same memory."""
        return self.table, HistoryRows(*4 * (self.table.entries.view(-1),))

    @property
    def num_bytes(self) -> int:
        """Bytes of the history."""
        return self.table.entries.nbytes

    def begin(self, entries: Mapping[int, np.ndarray]) -> None:
        """Send the histories of requests, int32 ``[3, L]`` by slot, on the current stream and without a wait."""
        send_rows(entries, self.table.entries)

    def replace(self, slot: int, position: int, token_ids: Sequence[int]) -> None:
        """Write tokens of one request, and forget what stands behind them."""
        for first in range(0, len(token_ids), _AT_ONCE):
            part = token_ids[first : first + _AT_ONCE]
            numbers = sent(np.array([slot, position + first, len(part), *part], np.int64), self.table.entries.device)
            history, rows = self.memory
            write_record(rows, recorded(numbers[:1], numbers[1:2], numbers[None, 3:], numbers[2:3], history))
        self.table.entries[slot, TOKEN, position + len(token_ids) :] = UNWRITTEN
