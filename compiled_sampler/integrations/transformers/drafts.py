"""Drafts for the sequences of a call, from the candidate generators of transformers, one for each sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers.generation import AssistedCandidateGenerator, PromptLookupCandidateGenerator

MOST_KNOWN = 8
"""Tokens of a sequence that may wait for the others of its batch before nothing more is drafted for it."""

Generator = Any
Make = Callable[[Tensor, int], Generator]
"""A candidate generator for a text int64 ``[1, T]`` of at most so many tokens."""


class Drafter:
    """Drafts for one sequence. Its text is what was emitted for it, also where the batch has not taken all of it."""

    def __init__(self, prompt: list[int], most: int, make: Make, vocab_size: int, device: torch.device) -> None:
        self._text, self._taken, self._most = list(prompt), len(prompt), most
        self._make, self._vocab_size, self._device = make, vocab_size, device
        self._generator: Generator = None
        self._num_known = self._num_candidates = 0

    def propose(self) -> list[int]:
        """What was emitted and not taken yet, and behind it what the generator thinks will follow."""
        known = self._text[self._taken :]
        candidates = [] if len(known) > MOST_KNOWN or len(self._text) >= self._most - 1 else self._candidates()
        self._num_known, self._num_candidates = len(known), len(candidates)
        return (known + candidates)[: self._most - self._taken - 1]

    def learn(self, emitted: list[int], logits: Tensor) -> None:
        """Keep what was emitted behind the tokens that were taken, and tell the generator how it did."""
        self._text = self._text[: self._taken] + emitted
        if self._num_candidates:
            matches = min(max(0, len(emitted) - 1 - self._num_known), self._num_candidates)
            scores = logits[None, self._num_known :]
            self._generator.update_candidate_strategy(self._ids(), scores, matches)

    def take(self, count: int) -> None:
        """The batch takes so many of the tokens that were emitted."""
        self._taken += count

    def _candidates(self) -> list[int]:
        if self._generator is None:
            self._generator = self._make(self._ids(), self._most)
        # The embedding may not have an id that the target cannot draw.
        found: list[int] = self._generator.get_candidates(self._ids())[0][0].tolist()
        return list(takewhile(lambda token: token < self._vocab_size, found[len(self._text) :]))

    def _ids(self) -> Tensor:
        return torch.tensor([self._text], device=self._device)


def prompt_lookup(generation_config: Any) -> Make:
    """Candidates that followed the last tokens before, in the text itself."""

    def made(input_ids: Tensor, most: int) -> Generator:
        return PromptLookupCandidateGenerator(
            eos_token_id=generation_config._eos_token_tensor,
            num_output_tokens=generation_config.prompt_lookup_num_tokens,
            max_matching_ngram_size=generation_config.max_matching_ngram_size or 2,
            max_length=most,
        )

    return made


def assistant(assistant_model: Any, generation_config: Any, drawing: dict[str, Any]) -> Make:
    """Candidates of a smaller model, drawn on the noise of the sequence, so it proposes what the target will draw."""

    def made(input_ids: Tensor, most: int) -> Generator:
        config = copy.copy(generation_config)
        config.max_length = most
        given = {"attention_mask": torch.ones_like(input_ids), **drawing}  # for ``generate`` of the assistant
        return AssistedCandidateGenerator(input_ids, assistant_model, config, given)

    return made
