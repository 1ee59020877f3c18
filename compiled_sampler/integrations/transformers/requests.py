"""What a call of ``generate`` asks for, as requests of a sampler: parameters, prompts, seeds and positions.

And which versions of transformers the loops fit: by number, and by what they call. The import of this module checks it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from compiled_sampler.integrations.engine_interface import Find, Interface, Supported
from compiled_sampler.params import SamplingParams

OWN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "TemperatureLogitsWarper": lambda processor: {"temperature": processor.temperature},
    "TopKLogitsWarper": lambda processor: {"top_k": processor.top_k},
    "TopPLogitsWarper": lambda processor: {"top_p": processor.top_p},
    "MinPLogitsWarper": lambda processor: {"min_p": processor.min_p},
    "RepetitionPenaltyLogitsProcessor": lambda processor: {"repetition_penalty": processor.penalty},
    "NoBadWordsLogitsProcessor": lambda processor: {"bad_words_ids": processor.bad_word_ids},
    "SequenceBiasLogitsProcessor": lambda processor: {"sequence_bias": processor.sequence_bias},
    "SuppressTokensLogitsProcessor": lambda processor: {"suppress_tokens": processor.suppress_tokens.tolist()},
    "MinLengthLogitsProcessor": lambda processor: {"min_length": processor.min_length},
    "MinNewTokensLengthLogitsProcessor": lambda processor: {"min_new_tokens": processor.min_new_tokens},
    "LogitNormalization": lambda processor: {},
}
"""Processors whose work the sampler does, with the fields of a GenerationConfig that they stand for."""

_DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "speculation_type")


def first_positions(input_ids: Tensor, model_kwargs: dict[str, Any], generation_config: Any) -> Tensor:
    """The position of the first token that each sequence draws, int64 ``[B]``: the tokens before it, no padding."""
    # Here alone positions of transformers become those of the sampler. ``position_ids`` are of input tokens, the last
    # one of a prompt is at ``n - 1``; the sampler's are of drawn ones, the first of which is at ``n``.
    mask: Tensor | None = model_kwargs.get("attention_mask")  # longer where a cache or embeddings hold what is before
    if mask is not None:
        return mask.to(input_ids.device).ne(0).sum(-1)
    # ``generate`` may keep the length of a mask that it left out.
    length = max(input_ids.shape[1], getattr(generation_config, "_mask_length", 0))
    return torch.full((input_ids.shape[0],), length, dtype=torch.int64, device=input_ids.device)


def prompt_tokens(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """The tokens that the mask marks in each row; of a prompt that is not all in ``input_ids``, those that are."""
    rows: list[list[int]] = input_ids.tolist()
    mask: Tensor | None = model_kwargs.get("attention_mask")
    if mask is None:
        return rows
    marks = mask[:, max(0, mask.shape[1] - input_ids.shape[1]) :].ne(0).tolist()
    return [
        [token for token, mark in zip(row, row_marks, strict=True) if mark]
        for row, row_marks in zip(rows, marks, strict=True)
    ]


def parameters(
    generation_config: Any,
    processors: LogitsProcessorList,
    seeds: Sequence[int | None] | None,
    positions: Sequence[int],
) -> tuple[list[SamplingParams], LogitsProcessorList]:
    """The parameters of each sequence, and the processors that stay as they are and run before the sampler's edits."""
    # Biases that a caller gives in a processor, not in the config, run as they are.
    names = OWN.keys() - ({"SequenceBiasLogitsProcessor"} if generation_config.sequence_bias is None else set())
    fields, others = sorted_processors(processors, names)
    config = copy.copy(generation_config)
    for field, value in fields.items():
        setattr(config, field, value)
    config.stop_strings = config.num_return_sequences = None  # are a criterion of generate, and rows of input_ids
    params = [SamplingParams.from_generation_config(config, prompt_len=length) for length in positions]
    # Criteria of ``generate`` end sequences; here ``min_tokens`` alone needs stop tokens.
    params = [
        replace(request, seed=seed, stop_token_ids=request.stop_token_ids if request.min_tokens else ())
        for request, seed in zip(params, _checked_seeds(seeds, len(positions)), strict=True)
    ]
    return params, LogitsProcessorList(others)


def check_loop(model: Any, generation_config: Any, drafts_are_known: bool) -> None:
    """Raise unless a loop, which may know how to verify drafts, can do what a call of ``generate`` asks for."""
    if model.config.is_encoder_decoder:
        raise ValueError("model must be a decoder alone, got one with an encoder; leave out custom_generate")
    for name in _DRAFTS[1:] if drafts_are_known else _DRAFTS:
        value = getattr(generation_config, name, None)
        if value:
            way_out = "leave it out" if drafts_are_known else "custom_generate=seeded_assisted verifies drafts"
            raise ValueError(f"{name} must be None here, got {value!r}; {way_out}")


def check_prompts(params: Sequence[SamplingParams], prompts: Sequence[list[int]], positions: Sequence[int]) -> None:
    """Raise where an edit reads a prompt that is not all in ``input_ids``: of embeddings, or begun in a cache alone."""
    for request, prompt, position in zip(params, prompts, positions, strict=True):
        needed = set(request.edits) & {"penalties", "bad_words"}
        if needed and len(prompt) != position:
            raise ValueError(
                f"input_ids must hold the whole prompt for {' and '.join(sorted(needed))}, got {len(prompt)} of "
                f"{position} tokens; pass them all, also with a cache"
            )


def _checked_seeds(seeds: Sequence[int | None] | None, count: int) -> Sequence[int | None]:
    if seeds is None:
        return [None] * count
    if isinstance(seeds, str | bytes) or not isinstance(seeds, Sequence):
        raise TypeError(f"seeds must be a sequence of ints, got {seeds!r}; [seed, ...], one for each sequence")
    if len(seeds) != count:
        raise ValueError(
            f"seeds must be one for each of the {count} sequences, got {len(seeds)}; num_return_sequences counts too"
        )
    return seeds


def sorted_processors(processors: Sequence[Any], names: Collection[str]) -> tuple[dict[str, Any], list[Any]]:
    """The fields that processors of some names of ``OWN`` stand for, and the other processors."""
    fields, others, seen = dict[str, Any](), list[Any](), set[str]()
    for processor in processors:
        name = type(processor).__name__
        if name not in names or type(processor) is not getattr(logits_process, name):
            others.append(processor)
            continue
        if name in seen:
            raise ValueError(f"logits_processor must have one {name}, got two; set its field in generate alone")
        seen.add(name)
        fields |= OWN[name](processor)
    return fields, others


OLDEST, NEWEST = "5.17", "5.24"
"""The versions that the tests passed with; a newer one is taken while it has what is called."""

_MIXIN = "transformers:GenerationMixin"
_RUNNER = "transformers.generation.continuous_batching.model_runner:ModelRunner"
_PROCESSORS = "transformers.generation.continuous_batching.cb_logits_processors:ContinuousBatchingLogitsProcessorList"
# fmt: off
CALLED = Interface(
    passed={
        f"{_MIXIN}._prefill": ("input_ids", "generation_config", "model_kwargs", "is_first_iteration"),
        f"{_MIXIN}.prepare_inputs_for_generation": ("input_ids", "next_sequence_length"),
        f"{_MIXIN}._update_model_kwargs_for_generation": (
            "outputs", "model_kwargs", "is_encoder_decoder", "num_new_tokens",
        ),
        f"{_MIXIN}._has_unfinished_sequences": ("this_peer_finished", "synced_gpus", "device"),
        f"{_MIXIN}._optimize_model_for_decode": (),
        f"{_MIXIN}._valid_auto_compile_criteria": ("model_kwargs", "generation_config"),
    }
)
"""What the loops call."""

REPLACED = Interface(
    passed={
        f"{_RUNNER}.__init__": (
            "logit_processor", "cb_config", "inputs_and_outputs", "cache", "do_sample", "return_logprobs",
        ),
        f"{_RUNNER}._forward_process_and_sample": (
            "model", "batch_data", "carry_over_ids", "prev_output_ids", "output_ids",
        ),
        f"{_RUNNER}._capture_graph": ("forward_fn", "compute_stream", "args"),
        f"{_RUNNER}._sample": ("scores", "output_ids"),
        f"{_PROCESSORS}.__init__": ("logits_processor", "per_request_processors", "drop_unsupported_processors"),
        f"{_PROCESSORS}.check_kwargs": ("kwargs",),
        f"{_PROCESSORS}.fill_defaults": ("int32_tensor",),
        f"{_PROCESSORS}.prepare_tensor_args": ("requests_in_batch", "arg_storage"),
    }
)
"""What the classes of continuous batching have that ours stand for."""
# fmt: on


def check_version(interface: Interface, version: str = transformers.__version__, find: Find | None = None) -> None:
    """Raise ImportError unless a version of transformers has an interface."""
    way_out = f"pip install 'transformers>={OLDEST},<={NEWEST}'"
    Supported("transformers", OLDEST, way_out, interface).check(version, find)


check_version(CALLED)
