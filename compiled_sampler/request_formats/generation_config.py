"""Sampling parameters out of a GenerationConfig of transformers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Number
from os import PathLike
from typing import Any

from compiled_sampler.edits import PARAMETERS
from compiled_sampler.request_formats import check_known, check_refused, value_of

DEFAULT_TOP_K = 50  # what ``generate`` of transformers takes for a ``top_k`` that nobody set

_SEARCH = "leave it out; the sampler draws, and searches nothing"
_PROCESSOR = "leave it out; in generate, its processor may run before: logits_processor=[...]"
_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "num_beams": ((1,), _SEARCH),
    "num_beam_groups": ((1,), _SEARCH),
    "diversity_penalty": ((0,), _SEARCH),
    "penalty_alpha": ((0,), _SEARCH),
    "dola_layers": ((), "leave it out; the model must mix its layers into the logits"),
    "constraints": ((), _SEARCH),
    "force_words_ids": ((), _SEARCH),
    "encoder_repetition_penalty": ((1,), _PROCESSOR),
    "no_repeat_ngram_size": ((0,), _PROCESSOR),
    "encoder_no_repeat_ngram_size": ((0,), _PROCESSOR),
    "exponential_decay_length_penalty": ((), _PROCESSOR),
    "begin_suppress_tokens": (((),), _PROCESSOR),
    "forced_bos_token_id": ((), _PROCESSOR),
    "forced_eos_token_id": ((), _PROCESSOR),
    "remove_invalid_values": ((False,), _PROCESSOR),
    "guidance_scale": ((1,), f"{_PROCESSOR}; elsewhere it is an edit of your own, as examples/guidance.py"),
    "watermarking_config": ((), f"{_PROCESSOR}; watermark_tokens is the watermark of the sampler"),
    "assistant_ensemble_weight": ((), "leave it out; the sampler verifies drafts by its own rules"),
}
"""Fields of a GenerationConfig that change the law in a way that no sampler here has, the values that do not, and a way
out."""

_NEUTRAL_FILTERS: dict[str, tuple[tuple[object, ...], str]] = {
    "top_h": ((), _PROCESSOR),
    "epsilon_cutoff": ((0,), _PROCESSOR),
    "eta_cutoff": ((0,), _PROCESSOR),
}
"""The same of filters, which greedy requests do not have."""

_PER_SEQUENCE: dict[str, tuple[tuple[object, ...], str]] = {
    "stop_strings": (((),), "a sampler sees no text: look for it in what was drawn, or name tokens in eos_token_id"),
    "num_return_sequences": ((1,), "add a request for each sequence, with a seed of its own"),
}
"""Fields of a GenerationConfig that one request cannot honour, the values that ask for nothing, and a way out."""

# fmt: off
_HARMLESS = frozenset((
    "do_sample", "max_length", "max_new_tokens", "max_time", "early_stopping", "length_penalty", "use_mtp", "use_cache",
    "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache", "renormalize_logits",
    "token_healing", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "pad_token_id", "bos_token_id", "decoder_start_token_id", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "speculation_type", "compile_config", "disable_compile", "continuous_batching_config",
    "low_memory", "prefill_chunk_size", "generation_kwargs", "transformers_version",
))
# fmt: on
"""Fields of a GenerationConfig that do not change the law of a token: of lengths, beams, caches, drafts and outputs."""
# fmt: off
_READ = frozenset((
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "sequence_bias", "suppress_tokens",
    "bad_words_ids", "eos_token_id", "min_length", "min_new_tokens",
))
# fmt: on
"""Those that are parameters of a request."""
_NOT_OF_GENERATE = tuple(name for name, parameter in PARAMETERS.items() if not parameter.in_generate)
"""Parameters of a request that ``generate`` does not have, by their names here."""
_UNREAD = "generate does not read it; dataclasses.replace(params, name=value) sets a parameter of the request"
KNOWN = _HARMLESS | _READ | {*_NEUTRAL, *_NEUTRAL_FILTERS, *_PER_SEQUENCE}
"""Fields of a GenerationConfig that are taken, refused or of no weight here, each by its name."""


def generation_config_fields(config: Any, prompt_len: int | None = None) -> dict[str, Any]:
    """The parameters that ``generate`` of transformers would draw with, as arguments of ``SamplingParams``."""
    if config is None or isinstance(config, str | bytes | PathLike | Number | Sequence | Set):
        raise TypeError(
            f"generation_config must have the fields of a GenerationConfig, got {config!r}; "
            "GenerationConfig.from_pretrained(folder), or a mapping, json.loads(text)"
        )
    is_greedy = value_of(config, "do_sample", False) is not True
    check_refused(config, _NEUTRAL | _PER_SEQUENCE if is_greedy else _NEUTRAL | _NEUTRAL_FILTERS | _PER_SEQUENCE)
    is_object = not isinstance(config, Mapping)
    # Of an object, as of a model's own ``generation_config.json``, fields that nobody knows are passed over, as
    # ``generate`` does; in a mapping they are refused.
    names = _NOT_OF_GENERATE if is_object else [name for name in config if not str(name).startswith("_")]
    check_known(names, config, KNOWN, _UNREAD)
    stops = _ids(value_of(config, "eos_token_id", ()))
    drawn = {
        "temperature": value_of(config, "temperature", 1.0),
        "top_k": value_of(config, "top_k", DEFAULT_TOP_K),
        "top_p": value_of(config, "top_p", 1.0),
        "min_p": value_of(config, "min_p", 0.0),
        "typical_p": value_of(config, "typical_p", 1.0),
    }
    if not is_greedy and drawn["typical_p"] != 1 and (drawn["top_k"], drawn["top_p"], drawn["min_p"]) != (0, 1, 0):
        raise ValueError(
            f"typical_p must be 1 beside top_k, top_p and min_p, got {drawn['typical_p']}; generate applies it behind "
            "them, a sampler before: top_k=0, top_p=1, min_p=0"
        )
    words = [list(_ids(word)) for word in value_of(config, "bad_words_ids", ())]
    return {
        **({"temperature": 0.0} if is_greedy else drawn),
        "repetition_penalty": value_of(config, "repetition_penalty", 1.0),
        "repetition_scope": "all",
        "logit_bias": _biases(config),
        "bad_words_token_ids": [word for word in words if word not in [[stop] for stop in stops]],
        "bad_words_scope": "all",
        "min_tokens": _min_tokens(config, prompt_len) if stops else 0,
        "stop_token_ids": stops,
    }


def _ids(value: Any) -> tuple[Any, ...]:
    """One token id, or several in a sequence or a tensor, as a tuple."""
    found = value.tolist() if hasattr(value, "tolist") else value
    return tuple(found) if isinstance(found, Iterable) and not isinstance(found, str) else (found,)


def _biases(config: Any) -> dict[Any, float]:
    """``sequence_bias`` of single tokens, and -inf for ``suppress_tokens``."""
    given = value_of(config, "sequence_bias", {})
    pairs = given.items() if isinstance(given, Mapping) else given
    made = {}
    for sequence, bias in pairs:
        if len(sequence) != 1:
            raise ValueError(
                f"sequence_bias must be of single tokens, got {tuple(sequence)}; pass SequenceBiasLogitsProcessor in "
                "logits_processor to run it before"
            )
        made[sequence[0]] = float(bias)
    return {**made, **dict.fromkeys(_ids(value_of(config, "suppress_tokens", ())), -math.inf)}


def _min_tokens(config: Any, prompt_len: int | None) -> Any:
    """``min_new_tokens``, which goes before ``min_length``."""
    new, total = value_of(config, "min_new_tokens", None), value_of(config, "min_length", 0)
    if new is not None or not total:
        return 0 if new is None else new
    if prompt_len is None:
        raise ValueError(f"min_length must come with prompt_len, which it counts, got {total}; or set min_new_tokens")
    return max(0, total - prompt_len)
