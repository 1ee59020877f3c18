"""What steps with logprobs read: the temperatures of all slots, and the ids whose logprobs are asked for."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.engine.boundary.arguments import is_capturing
from compiled_sampler.engine.requests.uploads import sent
from compiled_sampler.logprobs import LogprobInputs, Logprobs

_MOST_KEPT = 64  # tensors of ids that no captured step reads


class LogprobTables:
    """The inputs of logprobs on the device."""

    def __init__(self, processed_scale: Tensor) -> None:
        # processed_scale, float32 [S], see LogprobInputs
        self.processed_scale, self._device = processed_scale, processed_scale.device
        self._captured: dict[Logprobs, Tensor] = {}
        self._others: dict[tuple[Logprobs, int], Tensor] = {}

    def keep(self, every: Iterable[Logprobs], rows: int) -> None:
        """Put the ids of ``every`` on the device for up to ``rows`` rows, where captured steps may read them."""
        for wanted in every:
            if wanted.token_ids is not None:
                self._captured[wanted] = self._sent(wanted.token_ids, rows)

    def inputs(self, wanted: Logprobs | None, rows: int) -> LogprobInputs | None:
        """What a step of so many rows of logits reads; None if it is asked for no logprobs."""
        return None if wanted is None else LogprobInputs(wanted, self._given(wanted, rows), self.processed_scale)

    def _given(self, wanted: Logprobs, rows: int) -> Tensor | None:
        if wanted.token_ids is None:
            return None
        kept = self._captured.get(wanted)
        if kept is not None and rows <= len(kept):
            return kept[:rows]
        if is_capturing(self._device):  # filled in the graph: its memory is the graph's, and nothing is sent
            columns = (torch.full((rows,), each, device=self._device) for each in wanted.token_ids)
            return torch.stack([*columns], 1)
        if (wanted, rows) not in self._others:
            if len(self._others) >= _MOST_KEPT:
                self._others.clear()
            self._others[wanted, rows] = self._sent(wanted.token_ids, rows)
        return self._others[wanted, rows]

    def _sent(self, token_ids: tuple[int, ...], rows: int) -> Tensor:
        """Ids for each row, int64 ``[rows, n]``, without a wait for the device."""
        with torch.inference_mode(False):
            return sent(np.array(token_ids, np.int64), self._device).expand(rows, -1).contiguous()
