"""FlashInfer's sampling kernels from logits, with top_k before top_p and one generator a call. They need a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Params, Semantics
from compiled_sampler.conformance.adapters.peers import column, installed, seed_generator, top_ks


class FlashInfer:
    """``top_k_top_p_sampling_from_logits``, and the argmax for greedy rows, as engines call them.

    Thresholds are probabilities, so equal tokens are kept together.

    Args:
        vocab_size: V.
        device: of the logits.
    """

    semantics: ClassVar[Semantics] = Semantics(
        seeds="call",
        filters=("top_k", "top_p"),
        top_k_ties="all",
        top_p_ties="all",
        greedy_ties="any",
        nan="any",
        infinity="any",
        all_masked="any",
        unsupported=frozenset({"min_p"}),
    )

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Import FlashInfer, which this package does not need otherwise."""
        self.vocab_size, self.device = vocab_size, device
        self._kernels: Any = importlib.import_module("flashinfer.sampling")
        self._generator = torch.Generator(device)

    @staticmethod
    def versions() -> dict[str, str]:
        """The version of FlashInfer."""
        return installed("flashinfer-python")

    def sample(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> Tensor:
        """The token of each row, int64 ``[R]``."""
        if len(logits) == 0:
            return torch.empty(0, dtype=torch.int64)  # engines never call it without a request
        seed_generator(self._generator, seeds[0], int(positions[0]))
        temperature, top_p = (column(params, name, self.device) for name in ("temperature", "top_p"))
        greedy = temperature == 0.0
        drawn: Tensor = self._kernels.top_k_top_p_sampling_from_logits(
            (logits.float() / torch.where(greedy, 1.0, temperature)[:, None]).contiguous(),
            top_ks(params, self.vocab_size, self.device),
            top_p,
            filter_apply_order="top_k_first",
            deterministic=True,
            generator=self._generator,
        )
        return torch.where(greedy, logits.argmax(-1), drawn.long())
