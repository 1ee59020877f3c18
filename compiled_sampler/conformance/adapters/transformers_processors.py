"""The logits processors of transformers in the order of ``generate``, then softmax and ``torch.multinomial``."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Params, Semantics
from compiled_sampler.conformance.adapters.peers import seed_generator


class Transformers:
    """Rows are grouped by their parameters, since a processor has one setting for all; one generator a call.

    Args:
        vocab_size: V.
        device: of the logits.
    """

    semantics: ClassVar[Semantics] = Semantics(
        seeds="call", top_k_ties="all", top_p_ties="any", nan="raises", infinity="raises", all_masked="raises"
    )

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Import transformers, which this package does not need otherwise."""
        self.processors: Any = importlib.import_module("transformers")
        self.generator = torch.Generator(device)

    @staticmethod
    def versions() -> dict[str, str]:
        """The version of transformers."""
        return {"transformers": importlib.metadata.version("transformers")}

    def sample(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> Tensor:
        """The token of each row, int64 ``[R]``."""
        if len(seeds):
            seed_generator(self.generator, seeds[0], int(positions[0]))
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        for each in dict.fromkeys(params):
            rows = torch.tensor([row for row, found in enumerate(params) if found == each], device=logits.device)
            tokens[rows] = self._drawn(logits[rows].float(), each)
        return tokens

    def _drawn(self, logits: Tensor, params: Params) -> Tensor:
        if params.temperature == 0.0:
            return logits.argmax(-1)
        return torch.multinomial(self._processed(logits, params).softmax(-1), 1, generator=self.generator)[:, 0]

    def probs(self, logits: Tensor, params: Sequence[Params]) -> Tensor:
        """The law of each row, float32 ``[R, V]``."""
        return torch.cat([self._law(row[None], each) for row, each in zip(logits.float(), params, strict=True)])

    def _law(self, logits: Tensor, params: Params) -> Tensor:
        if params.temperature == 0.0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        return self._processed(logits, params).softmax(-1)

    def _processed(self, logits: Tensor, params: Params) -> Tensor:
        """The filtered logits, float32 ``[R, V]``."""
        chain = self.processors.LogitsProcessorList()
        if params.temperature != 1.0:
            chain.append(self.processors.TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            chain.append(self.processors.TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            chain.append(self.processors.TopPLogitsWarper(params.top_p))
        if params.min_p > 0.0:
            chain.append(self.processors.MinPLogitsWarper(params.min_p))
        ids = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)
        filtered: Tensor = chain(ids, logits)
        return filtered
