"""The sequences of a call of ``generate`` while they grow, and what is recorded beside them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.utils import ALL_CACHE_NAMES


class Text:
    """Token ids that grow by one column at a time, until the stopping criteria end every sequence."""

    def __init__(
        self, input_ids: Tensor, stopping_criteria: StoppingCriteriaList, pad_token_id: Tensor | None, streamer: Any
    ) -> None:
        self.token_ids, self._criteria, self._streamer = input_ids, stopping_criteria, streamer
        self.unfinished = torch.ones(len(input_ids), dtype=torch.int64, device=input_ids.device)  # 1: goes on
        self.is_finished = False
        # Sequences that ended get padding; without an eos token they are drawn on.
        self.pads = any(hasattr(each, "eos_token_id") for each in stopping_criteria)
        self._pad = input_ids.new_zeros(()) if pad_token_id is None else pad_token_id.to(input_ids.device)

    def append(self, token_ids: Tensor, scores: Any) -> None:
        """Add a token to every sequence, in the order of transformers: padding, the text, criteria, the streamer."""
        if self.pads:
            token_ids = torch.where(self.unfinished.bool(), token_ids, self._pad)
        lowest = token_ids.amin()
        self.token_ids = torch.cat([self.token_ids, token_ids[:, None]], -1)
        self.unfinished = self.unfinished & ~self._criteria(self.token_ids, scores)
        first, alive = torch.stack([lowest, self.unfinished.amax()]).tolist()  # one wait for both
        if first < 0:
            raise RuntimeError("each row of logits must have a token to draw, got one whose tokens are all masked")
        self.is_finished = alive == 0
        if self._streamer is not None:
            self._streamer.put(token_ids.cpu())

    def alive(self) -> list[bool]:
        """Whether each sequence still needs tokens: those that ended get padding if there is an eos token."""
        return [bool(each) for each in self.unfinished.tolist()] if self.pads else [True] * len(self.unfinished)

    def end(self) -> None:
        """Tell the streamer that nothing follows."""
        if self._streamer is not None:
            self._streamer.end()


class Record:
    """What ``generate`` returns beside the sequences, a tuple with an entry for each token."""

    def __init__(self, generation_config: Any) -> None:
        self._returns_dict = bool(generation_config.return_dict_in_generate)
        names = {"scores": "output_scores", "logits": "output_logits"}
        names |= {"attentions": "output_attentions", "hidden_states": "output_hidden_states"}
        wanted = {name for name, field in names.items() if self._returns_dict and getattr(generation_config, field)}
        self._parts: dict[str, tuple[Any, ...] | None] = {name: () if name in wanted else None for name in names}

    @property
    def scores(self) -> tuple[Any, ...] | None:
        """Log-probabilities float32 ``[B, V]`` of the law of each token, -inf for what a filter drops, if wanted."""
        return self._parts["scores"]

    @property
    def wants_scores(self) -> bool:
        """Whether scores are to be added."""
        return self._parts["scores"] is not None

    def add(self, **parts: Any) -> None:
        """Add the entries of one token, of which those that are wanted are kept."""
        for name, part in parts.items():
            kept = self._parts[name]
            if kept is not None:
                self._parts[name] = (*kept, part.to(torch.float32, copy=True) if name == "logits" else part)

    def result(self, token_ids: Tensor, model_kwargs: dict[str, Any]) -> Any:
        """What ``generate`` returns: int64 ``[B, T]``, or a ``GenerateDecoderOnlyOutput`` with parts and cache."""
        if not self._returns_dict:
            return token_ids
        fields = {each.name for each in dataclasses.fields(GenerateDecoderOnlyOutput)}
        cache = {"cache" if "cache" in fields else "past_key_values": cache_of(model_kwargs)}
        return GenerateDecoderOnlyOutput(sequences=token_ids, **self._parts, **cache)


def cache_of(holder: Any) -> Any:
    """The cache in keyword arguments or outputs of a model, under whichever name it has there; None without one."""
    return next((holder[name] for name in ALL_CACHE_NAMES if holder.get(name) is not None), None)
