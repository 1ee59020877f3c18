"""Assisted generation for batches: drafts are verified by the rule ``match``, so tokens are those without drafts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import AssistedCandidateGenerator, PromptLookupCandidateGenerator

from compiled_sampler.integrations.transformers import requests
from compiled_sampler.integrations.transformers.sampling import (
    Batch,
    Record,
    Steps,
    Text,
    cache_of,
    draw_column,
    forward_of,
    sample,
)

MOST_KNOWN = 8  # tokens of a sequence that may wait for the others of its batch before nothing more is drafted for it

Generator = Any
Make = Callable[[Tensor, int], Generator]  # a candidate generator for a text int64 ``[1, T]`` of at most so many tokens


@torch.no_grad()
def seeded_assisted(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    assistant_model: Any = None,
    *,
    seeds: Sequence[int | None] | None = None,
    sampler_backend: str = "auto",
    **model_kwargs: Any,
) -> Any:
    """Decode as ``sample`` does, to the same tokens, with several of them in a forward pass.

    Drafts come from ``prompt_lookup_num_tokens`` of the config, or from an assistant, which ``generate`` does not hand
    on: bind it, ``custom_generate=functools.partial(seeded_assisted, assistant_model=assistant)``.

    The sequences of a batch move on together, by the tokens that each of them has. What others have beyond is drafted
    again in the next pass, and accepted, so nothing is lost but time.

    Args:
        model: as in ``sample``; its cache must be one that can be cropped.
        input_ids: as in ``sample``.
        logits_processor: as in ``sample``.
        stopping_criteria: as in ``sample``.
        generation_config: as in ``sample``.
        synced_gpus: must be false.
        streamer: as in ``sample``; it takes single tokens.
        assistant_model: a smaller model of the same vocabulary; its head may have more rows than the target's, which
            it does not draw from.
        seeds: as in ``sample``.
        sampler_backend: as in ``sample``.
        model_kwargs: of the model.

    Returns:
        As ``sample``, without attentions and hidden states.

    Raises:
        RuntimeError, TypeError, ValueError: as ``sample``; no drafts, no cache, or one that cannot be cropped.
    """
    requests.check_loop(model, generation_config, drafts_are_known=True)
    _check_assisted(generation_config, assistant_model, synced_gpus, model_kwargs)
    record = Record(generation_config)
    text = Text(input_ids, stopping_criteria, generation_config._pad_token_tensor, streamer)
    batch = Batch.of_call(generation_config, logits_processor, seeds, sampler_backend, input_ids, model_kwargs)
    forward = forward_of(model, generation_config, model_kwargs)
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    _begin_recording(cache_of(outputs))
    with batch.steps(outputs.logits) as steps, model._optimize_model_for_decode():
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
        draw_column(steps, text, record, outputs)
        drawing = {
            "custom_generate": sample,
            "sampler_backend": sampler_backend,
            "vocab_size": steps.sampler.vocab_size,
        }

        def make(seed: int | None) -> Make:
            if assistant_model is None:
                return functools.partial(_prompt_lookup, generation_config)
            return functools.partial(_assistant, assistant_model, generation_config, {**drawing, "seeds": [seed]})

        passes = _Passes(model, forward, steps, text, record)
        passes.begin(batch, generation_config.max_length - input_ids.shape[1], make)
        while not text.is_finished:
            model_kwargs = passes.advance(model_kwargs)
    text.end()
    return record.result(text.token_ids, model_kwargs)


class _Passes:
    """Forward passes over drafts, each of which moves every sequence on by the same number of tokens."""

    def __init__(self, model: Any, forward: Callable[..., Any], steps: Steps, text: Text, record: Record) -> None:
        self._model, self._forward, self._steps, self._text, self._record = model, forward, steps, text, record
        self._drafters: list[Drafter] = []

    def begin(self, batch: Batch, most_new: int, make: Callable[[int | None], Make]) -> None:
        """Make a drafter for every sequence, behind its first token."""
        first = self._text.token_ids[:, -1].tolist()
        for prompt, token, seed in zip(batch.prompts, first, self._steps.seeds, strict=True):
            most, device = len(prompt) + most_new, self._text.token_ids.device
            self._drafters.append(Drafter([*prompt, token], most, make(seed), self._steps.sampler.vocab_size, device))

    def advance(self, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Draft, verify, and take what every sequence has; the arguments of the next pass."""
        alive = self._text.alive()
        drafters = zip(self._drafters, alive, strict=True)
        proposals = [drafter.propose() if goes_on else [] for drafter, goes_on in drafters]
        width = max(map(len, proposals))
        candidates = _candidates(self._text.token_ids, proposals, width)
        outputs = self._forward(**self._inputs(candidates, width, model_kwargs), return_dict=True)
        raw = outputs.logits[:, -width - 1 :]
        logits = self._steps.prepared_columns(candidates, raw)
        verified, laws = self._steps.verified(logits, proposals, self._record.wants_scores)
        emitted = verified.tolist()
        for row, drafter in enumerate(self._drafters):
            if alive[row]:
                drafter.learn(emitted[row], logits[row, : len(proposals[row]) + 1])
        count = self._take(verified.token_ids, [len(tokens) for tokens in emitted], raw, laws)
        cache_of(outputs).crop(count - width - 1)
        return dict(self._model._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=count))

    def _inputs(self, candidates: Tensor, width: int, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a forward pass over the last token and ``width`` drafts."""
        if width:
            model_kwargs = self._model._update_model_kwargs_for_generation({}, {**model_kwargs}, num_new_tokens=width)
        inputs = self._model.prepare_inputs_for_generation(candidates, next_sequence_length=width + 1, **model_kwargs)
        return {**inputs, **({"logits_to_keep": width + 1} if "logits_to_keep" in inputs else {})}

    def _take(self, token_ids: Tensor, counts: list[int], raw: Tensor, laws: list[Tensor]) -> int:
        """Append columns while every sequence that goes on has a token there; how many were."""
        column = 0
        while not self._text.is_finished and (column == 0 or self._have_all(counts, column)):
            self._record.add(logits=raw[:, column], **({"scores": laws[column]} if laws else {}))
            self._text.append(token_ids[:, column], self._record.scores)
            column += 1
        for drafter in self._drafters:
            drafter.take(column)
        self._steps.positions = self._steps.positions + column
        return column

    def _have_all(self, counts: list[int], column: int) -> bool:
        return all(count > column for count, alive in zip(counts, self._text.alive(), strict=True) if alive)


def _candidates(token_ids: Tensor, proposals: list[list[int]], width: int) -> Tensor:
    """The text with drafts behind it, int64 ``[B, T + width]``; token 0 stands where a sequence has fewer."""
    padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in proposals]
    drafted = torch.tensor(padded, dtype=token_ids.dtype, device=token_ids.device).view(len(proposals), width)
    return torch.cat([token_ids, drafted], -1)


def _check_assisted(generation_config: Any, assistant_model: Any, synced_gpus: bool, model_kwargs: Any) -> None:
    """Raise unless there are drafts to verify and a cache to keep them in."""
    if assistant_model is None and generation_config.prompt_lookup_num_tokens is None:
        raise ValueError(
            "assistant_model or prompt_lookup_num_tokens must be given, got neither; generate does not hand an "
            "assistant on: custom_generate=functools.partial(seeded_assisted, assistant_model=assistant)"
        )
    if not model_kwargs.get("use_cache") or cache_of(model_kwargs) is None:
        raise ValueError("use_cache must be True for drafts, got no cache; custom_generate=sample needs none")
    for name in ("output_attentions", "output_hidden_states"):
        if generation_config.return_dict_in_generate and getattr(generation_config, name):
            raise ValueError(f"{name} must be False with drafts, got True; custom_generate=sample returns them")
    if synced_gpus:
        raise ValueError("synced_gpus must be False with drafts, got True; custom_generate=sample can wait for others")


def _begin_recording(cache: Any) -> None:
    """Have a cache keep what a window would drop, so that drafts can be taken back."""
    if not getattr(cache, "is_croppable", True):
        raise ValueError(
            f"the cache must be one that can be cropped, got {type(cache).__name__}; use custom_generate=sample"
        )
    cache.activate_past_recording()


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
        ids: list[int] = self._generator.get_candidates(self._ids())[0][0].tolist()
        return list(takewhile(lambda token: token < self._vocab_size, ids[len(self._text) :]))

    def _ids(self) -> Tensor:
        return torch.tensor([self._text], device=self._device)


def _prompt_lookup(config: Any, input_ids: Tensor, most: int) -> Generator:
    """Candidates that followed the last tokens before, in the text itself."""
    return PromptLookupCandidateGenerator(
        eos_token_id=config._eos_token_tensor,
        num_output_tokens=config.prompt_lookup_num_tokens,
        max_matching_ngram_size=config.max_matching_ngram_size or 2,
        max_length=most,
    )


def _assistant(model: Any, config: Any, drawing: dict[str, Any], input_ids: Tensor, most: int) -> Generator:
    """Candidates of a smaller model, drawn on the noise of the sequence, so it proposes what the target will draw."""
    config = copy.copy(config)
    config.max_length = most
    given = {"attention_mask": torch.ones_like(input_ids), **drawing}  # for ``generate`` of the assistant
    return AssistedCandidateGenerator(input_ids, model, config, given)
