"""Softmax, sort and ``torch.multinomial``, as samplers are often written: one generator a call, or one a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Params, Semantics
from compiled_sampler.conformance.adapters.peers import seed_generator


class PlainTorch:
    """One generator for the whole call, seeded with the first row's seed and position.

    Args:
        vocab_size: V.
        device: of the logits.
    """

    semantics: ClassVar[Semantics] = Semantics(
        seeds="call", top_k_ties="any", top_p_ties="any", nan="raises", infinity="raises", all_masked="raises"
    )

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Make the generator."""
        self.generator = torch.Generator(device)

    def sample(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> Tensor:
        """The token of each row, int64 ``[R]``."""
        probabilities = self.probs(logits, params)
        self._seed(seeds, positions, 0)
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]

    def _seed(self, seeds: Sequence[int | None], positions: Tensor, row: int) -> None:
        if len(seeds):
            seed_generator(self.generator, seeds[row], int(positions[row]))

    def probs(self, logits: Tensor, params: Sequence[Params]) -> Tensor:
        """The law of each row, float32 ``[R, V]``."""
        column = (torch.tensor([getattr(p, name) for p in params], device=logits.device)[:, None] for name in _NAMES)
        temperature, top_k, top_p, min_p = column
        greedy = temperature == 0.0
        scaled = logits.float() / torch.where(greedy, 1.0, temperature)
        p, ids = torch.softmax(scaled, -1).sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(p.shape[1], device=p.device)
        p = p.masked_fill((rank >= torch.where(top_k > 0, top_k, p.shape[1])) | (greedy & (rank > 0)), 0.0)
        first = p[:, :1]
        before = p.cumsum(-1) - p
        outside = (before >= top_p * p.sum(-1, keepdim=True)) & (top_p < 1.0) & (rank > 0)
        p = p.masked_fill(outside | (p < min_p * first), 0.0)
        p = torch.zeros_like(p).scatter(1, ids, p)
        return p / p.sum(-1, keepdim=True)


_NAMES = ("temperature", "top_k", "top_p", "min_p")


class RowGenerators(PlainTorch):
    """One generator for each row, seeded with its own seed and position."""

    semantics: ClassVar[Semantics] = Semantics(
        top_k_ties="any", top_p_ties="any", nan="raises", infinity="raises", all_masked="raises"
    )

    def sample(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> Tensor:
        """The token of each row, int64 ``[R]``."""
        probabilities, tokens = self.probs(logits, params), []
        for row in range(len(logits)):
            self._seed(seeds, positions, row)
            tokens.append(torch.multinomial(probabilities[row], 1, generator=self.generator))
        return torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64)
