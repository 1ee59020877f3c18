"""The kernels of vLLM's V2 model runner in its order: temperature, min_p, top_k and top_p, a Gumbel race.

Noise is keyed by seed, position and token, so a row promises its token in every batch. The kernels need a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Params, Semantics, as_int64
from compiled_sampler.conformance.adapters.peers import column, installed, top_ks

_HERE = "vllm.v1.worker.gpu.sample"


class VllmV2:
    """``apply_temperature``, ``apply_min_p``, ``apply_top_k_top_p`` and ``gumbel_sample``.

    Args:
        vocab_size: V.
        device: of the logits.
    """

    semantics: ClassVar[Semantics] = Semantics(
        filters=("min_p", "top_k", "top_p"),
        top_k_ties="any",
        top_p_ties="any",
        greedy_ties="any",
        nan="any",
        infinity="any",
        all_masked="any",
        unseeded=False,
    )

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Import vLLM, which this package does not need otherwise."""
        self.vocab_size, self.device = vocab_size, device
        self._gumbel: Any = importlib.import_module(f"{_HERE}.gumbel")
        self._min_p: Any = importlib.import_module(f"{_HERE}.min_p")
        self._filters: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")

    @staticmethod
    def versions() -> dict[str, str]:
        """The version of vLLM."""
        return installed("vllm")

    def sample(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> Tensor:
        """The token of each row, int64 ``[R]``."""
        rows = len(logits)
        if rows == 0:
            return torch.empty(0, dtype=torch.int64)  # the runner never calls it without a request
        requests = torch.arange(rows, dtype=torch.int32, device=self.device)
        temperature, top_p, min_p = (column(params, name, self.device) for name in ("temperature", "top_p", "min_p"))
        numbers = torch.tensor([as_int64(seed or 0) for seed in seeds], device=self.device)
        x = logits.float().contiguous().clone()
        self._gumbel.apply_temperature(x, requests, temperature)
        if any(each.min_p for each in params):
            self._min_p.apply_min_p(x, requests, min_p)
        x = self._filters.apply_top_k_top_p(
            x,
            top_ks(params, self.vocab_size, self.device) if any(each.top_k for each in params) else None,
            top_p if any(each.top_p < 1.0 for each in params) else None,
        )
        places = positions.to(self.device)
        drawn: Tensor = self._gumbel.gumbel_sample(
            x, requests, temperature, numbers, places, apply_temperature=False, is_drafting=False
        )
        return drawn
