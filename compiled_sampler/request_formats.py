"""Sampling parameters out of what other libraries hold: a GenerationConfig of transformers, a request body of OpenAI's.

Both functions return keyword arguments of ``SamplingParams``, which checks their values. A field that is set and that a
sampler cannot honour is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from numbers import Integral, Number
from os import PathLike
from typing import Any

from compiled_sampler.edits import PARAMETERS

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
    ids = value.tolist() if hasattr(value, "tolist") else value
    return tuple(ids) if isinstance(ids, Iterable) and not isinstance(ids, str) else (ids,)


def _biases(config: Any) -> dict[Any, float]:
    """``sequence_bias`` of single tokens, and -inf for ``suppress_tokens``."""
    given = value_of(config, "sequence_bias", {})
    pairs = given.items() if isinstance(given, Mapping) else given
    biases = {}
    for sequence, bias in pairs:
        if len(sequence) != 1:
            raise ValueError(
                f"sequence_bias must be of single tokens, got {tuple(sequence)}; pass SequenceBiasLogitsProcessor in "
                "logits_processor to run it before"
            )
        biases[sequence[0]] = float(bias)
    return {**biases, **dict.fromkeys(_ids(value_of(config, "suppress_tokens", ())), -math.inf)}


def _min_tokens(config: Any, prompt_len: int | None) -> Any:
    """``min_new_tokens``, which goes before ``min_length``."""
    new, total = value_of(config, "min_new_tokens", None), value_of(config, "min_length", 0)
    if new is not None or not total:
        return 0 if new is None else new
    if prompt_len is None:
        raise ValueError(f"min_length must come with prompt_len, which it counts, got {total}; or set min_new_tokens")
    return max(0, total - prompt_len)


_OPENAI = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "extra_args"),
    *(name for name, parameter in PARAMETERS.items() if parameter.in_openai),
)
"""Fields of a request body that are parameters of the same name: all but ``eos_token_id``, which is the model's."""

# fmt: off
_ENGINES = frozenset((
    "model", "messages", "prompt", "suffix", "echo", "stream", "stream_options", "max_tokens",
    "max_completion_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "tools",
    "parallel_tool_calls", "functions", "user", "metadata", "store", "service_tier",
    "modalities", "audio", "reasoning_effort", "verbosity", "safety_identifier", "prompt_cache_key",
    "add_generation_prompt", "chat_template", "chat_template_kwargs", "include_stop_str_in_output",
    "skip_special_tokens", "spaces_between_special_tokens", "priority", "request_id", "return_token_ids",
    "logprob_token_ids", "include_reasoning", "continue_final_message", "add_special_tokens", "documents",
    "truncate_prompt_tokens", "truncation_side", "prompt_embeds", "media_io_kwargs", "mm_processor_kwargs",
    "return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text", "return_mm_kwargs",
    "routed_experts_prompt_start", "session_id", "cache_salt", "kv_transfer_params", "ec_transfer_params",
    "stream_interval", "detokenize", "output_kind", "flat_logprobs", "prompt_logprob_token_ids",
))
# fmt: on
"""Fields of a request body that say nothing of the law of a token: the engine's own matter."""
_OFF_AT_MINUS_1 = {
    "top_k": 0,
    "seed": None,
    **{name: 0 for name, parameter in PARAMETERS.items() if parameter.off_at_minus_1},
}
"""Parameters that vLLM and llama.cpp switch off by -1, and what does so here."""
_CHOICES = "add a request for each choice"
_BEAMS = "the sampler draws, and searches no beams"
_GRAMMAR = "pass a grammar's masks as token_bitmask"
_GRAMMARS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
    "structural_tag",
)
"""Fields of vLLM, SGLang and llama.cpp for a grammar."""
_NEUTRAL_OPENAI: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), _CHOICES),
    "best_of": ((1,), _CHOICES),
    "response_format": (({"type": "text"},), _GRAMMAR),
    **dict.fromkeys(_GRAMMARS, ((), _GRAMMAR)),
    "tool_choice": (("none", "auto"), _GRAMMAR),
    "function_call": (("none", "auto"), _GRAMMAR),
    "use_beam_search": ((False,), _BEAMS),
    "length_penalty": ((1,), _BEAMS),
    "bad_words": (((),), "a sampler sees no text: bad_words_token_ids"),
    "watermarking": ((False,), "watermark_tokens is the watermark of the sampler"),
    "thinking_token_budget": ((-1,), "the engine must count the tokens of a thought"),
    "repetition_detection": ((), "the engine must look for repetitions; dry_multiplier makes them rare"),
    "eos_token_id": ((), "it is the model's: from_openai(body, eos_token_id=...)"),
    "sampling_seed": ((), "it is seed here"),
    "repeat_penalty": ((1,), "it is repetition_penalty here"),
    "min_new_tokens": ((0,), "it is min_tokens here"),
    "logits_processors": (((),), "an edit of your own is an argument of the sampler: Sampler(edits=[...])"),
}
"""Fields of a request body that a sampler cannot honour, the values that ask for nothing, and a way out."""


def openai_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a chat or completions request, as arguments of ``SamplingParams``."""
    if not isinstance(body, Mapping):
        raise TypeError(f"body must be a mapping, got {body!r}; json.loads(text)")
    fields = _given_fields(body)
    check_refused(fields, _NEUTRAL_OPENAI)
    _check_tools(body.get("tools"))
    given = {name: value for name, value in fields.items() if name not in _NEUTRAL_OPENAI}
    for name, parameter in PARAMETERS.items():
        for alias in parameter.aliases.keys() & given.keys():
            check_neutral(given, name, (), f"{alias} says the same")
            given |= parameter.aliases[alias](given.pop(alias))
    stops = [*_stops(given.pop("stop", ())), *_sequence("stop_token_ids", given.pop("stop_token_ids", ()))]
    check_known(given, given, _OPENAI, "the sampler has no such parameter")
    given |= {name: off for name, off in _OFF_AT_MINUS_1.items() if given.get(name) == -1}
    return {**given, "stop_token_ids": stops}


def _check_tools(tools: object) -> None:
    """Raise where the arguments of a tool must follow its schema; what is no list of tools is the engine's matter."""
    for tool in tools if isinstance(tools, Sequence) else ():
        for holder in (tool, value_of(tool, "function", {})):
            check_neutral(holder, "strict", (False,), f"in tools: {_GRAMMAR}")


def _stops(stop: object) -> list[object]:
    stops: list[object] = [stop] if isinstance(stop, str | Integral) else _sequence("stop", stop)
    if any(isinstance(stop_id, str) for stop_id in stops):
        raise ValueError(f"stop must be token ids, got {stop!r}; the engine must look for text, a sampler sees none")
    if any(isinstance(stop_id, bool) or not isinstance(stop_id, Integral) for stop_id in stops):
        raise TypeError(f"stop must be token ids, got {stop!r}; an int or [id, ...]")
    return stops


def _sequence(name: str, values: object) -> list[object]:
    words = f"{name} must be a sequence of ints, got {values!r}; [id, ...]"
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(words)
    try:
        return list(values)
    except TypeError:  # such as an array without dimensions
        raise TypeError(words) from None


def _given_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are set, to more than None, and not the engine's; those in ``vllm_xargs`` among them."""
    given = {name: value for name, value in body.items() if value is not None and name not in _ENGINES}
    further = given.pop("vllm_xargs", {})
    if not isinstance(further, Mapping):
        raise TypeError(f"vllm_xargs must be a mapping, got {further!r}; {{name: value}}")
    twice = sorted(set(given) & set(further))
    if twice:
        raise ValueError(f"{twice[0]} must be given once, got it in vllm_xargs too; leave one out")
    return {**given, **{name: value for name, value in further.items() if value is not None}}


def check_refused(holder: Any, refused: Mapping[str, tuple[tuple[object, ...], str]]) -> None:
    """Raise unless fields ask for nothing, each with the values that do and a way out."""
    for name, (values, way_out) in refused.items():
        check_neutral(holder, name, values, way_out)


def check_neutral(holder: Any, name: str, values: tuple[object, ...], way_out: str) -> None:
    """Raise unless a field has one of the values that ask for nothing; a list counts as a tuple."""
    value = value_of(holder, name, None)
    if value is not None and value not in values and (tuple(value) if isinstance(value, list) else value) not in values:
        meant = " or ".join(repr(neutral) for neutral in values if neutral != ()) or "None"
        raise ValueError(f"{name} must be {meant} here, got {value!r}; {way_out}")


def check_known(names: Iterable[str], holder: Any, known: Collection[str], way_out: str) -> None:
    """Raise where a field is set that nobody reads."""
    unread = sorted((name for name in names if name not in known and value_of(holder, name, None) is not None), key=str)
    if unread:
        raise ValueError(f"{unread[0]} must be left out, got {value_of(holder, unread[0], None)!r}; {way_out}")


def value_of(holder: Any, name: str, default: Any) -> Any:
    """A field of an object or a mapping; the default where it is missing or None."""
    value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
    return default if value is None else value
