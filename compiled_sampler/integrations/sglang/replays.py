"""Draws that are replays of CUDA graphs: SGLang captures its model alone, and a draw launches 6 to 20 stages."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.lowering.compiled_stages import CompiledStages
from graph_cache import BufferSpec, CaptureBackend, GraphCache, LateCaptures


class Drawn(NamedTuple):
    """What a draw returns."""

    token_ids: Tensor  # int32 ``[B]``


Draw = Callable[..., Drawn]
"""``draw(mode, logits=..., **rows)``: logits ``[B, V]`` and one number a row ``[B]`` of each name of ``ROWS``."""

# A row of padding is greedy, which every mode covers. The dtypes are SGLang's.
ROWS = {
    "seeds": BufferSpec((), torch.int64, 0),
    "positions": BufferSpec((), torch.int64, 0, also=(torch.int32,)),
    "temperature": BufferSpec((), torch.float32, 1.0),
    "top_k": BufferSpec((), torch.int32, 1, also=(torch.int64,)),
    "top_p": BufferSpec((), torch.float32, 1.0),
    "min_p": BufferSpec((), torch.float32, 0.0),
}
MOST_ROWS = 256
MOST_LOGITS_BYTES = 256 << 20
"""The limits of the largest bucket; its logits lie in a buffer of the cache."""
_logger = logging.getLogger("compiled_sampler")


class ReplayedDraws:
    """Draws on one stream; each mode and bucket of rows is captured after a batch whose stages were all compiled.

    Args:
        draw: what is captured.
        stages: run the stages of ``draw``.
        logits: of the first batch; batches of another V or dtype are drawn without a graph.
        capture_backend: None for CUDA graphs.
    """

    def __init__(
        self, draw: Draw, stages: CompiledStages, logits: Tensor, capture_backend: CaptureBackend | None = None
    ) -> None:
        self._draw, self._stages = draw, stages
        self._logits = BufferSpec((logits.shape[1],), logits.dtype, 0.0)
        most = min(MOST_ROWS, MOST_LOGITS_BYTES // (logits.shape[1] * logits.dtype.itemsize))
        sizes = [1 << power for power in range(most.bit_length())]  # powers of two up to the most
        self._cache = GraphCache(logits.device, sizes, backend=capture_backend)
        self._late = LateCaptures(self._cache, lambda: stages.are_settled, _logger)
        self._modes: set[str] = set()  # registered
        self._captured: set[tuple[str, int]] = set()

    def __call__(self, mode: str, logits: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """The tokens of a batch, int32 ``[B]``, in memory that no later draw writes.

        A mode always has the same ``rows``, by name.
        """
        tensors, bucket = {"logits": logits, **rows}, self._bucket(logits)
        if (mode, bucket) in self._captured:
            replayed: Drawn = self._cache.run(mode, tensors)
            return replayed.token_ids
        before = self._stages.num_uncompiled_calls
        drawn = self._draw(mode, **tensors)  # first, as it asks for the stages
        if bucket is None or self._stages.num_uncompiled_calls != before or self._stages.lacks_kernels:
            return drawn.token_ids
        if mode not in self._modes:
            inputs = {name: ROWS.get(name, self._logits) for name in tensors}
            self._cache.register(mode, functools.partial(self._draw, mode), inputs)
            self._modes.add(mode)
        if self._late.capture(mode, tensors, len(logits)):
            self._captured.add((mode, bucket))
        return drawn.token_ids

    def _bucket(self, logits: Tensor) -> int | None:
        """The rows of the variant that serves a batch; None where none may."""
        fits = logits.shape[1:] == self._logits.shape and logits.dtype is self._logits.dtype
        return self._cache.ladder.bucket_for(logits.shape[0]) if fits and logits.shape[0] else None
