"""Sampling parameters out of what other libraries hold: a GenerationConfig of transformers, a request body of OpenAI's.

Both functions return keyword arguments of ``SamplingParams``, which checks their values. A field that is set and that a
sampler cannot honour is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

DEFAULT_TOP_K = 50
"""What ``generate`` of transformers takes for a ``top_k`` that nobody set."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "begin_suppress_tokens": ((),),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "remove_invalid_values": (False,),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "assistant_ensemble_weight": (),
}
"""Fields of a GenerationConfig that change the law in a way that no sampler here has, and the values that do not."""

_NEUTRAL_FILTERS: dict[str, tuple[object, ...]] = {
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}
"""The same of filters, which greedy requests do not have."""

_PER_SEQUENCE: dict[str, tuple[tuple[object, ...], str]] = {
    "stop_strings": (((),), "a sampler sees no text: look for it in what was drawn, or name tokens in eos_token_id"),
    "num_return_sequences": ((1,), "add a request for each sequence, with a seed of its own"),
}
"""Fields of a GenerationConfig that one request cannot honour, the values that ask for nothing, and a way out."""

_OPENAI = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "repetition_scope",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_range",
    "dry_sequence_breakers",
    "logit_bias",
    "min_tokens",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words_token_ids",
    "bad_words_scope",
    "ignore_eos",
    "watermark_tokens",
    "extra_args",
    "top_n_sigma",
    "min_k",
    "min_k_tau",
    "p_less",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
)
"""Fields of a request body that are parameters of the same name: all but ``eos_token_id``, which is the model's."""

# fmt: off
_ENGINES = frozenset((
    "model", "messages", "prompt", "suffix", "echo", "stream", "stream_options", "max_tokens",
    "max_completion_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "tools", "tool_choice",
    "parallel_tool_calls", "functions", "function_call", "user", "metadata", "store", "service_tier",
    "modalities", "audio", "reasoning_effort", "verbosity", "safety_identifier", "prompt_cache_key",
    "add_generation_prompt", "chat_template", "chat_template_kwargs", "include_stop_str_in_output",
    "skip_special_tokens", "spaces_between_special_tokens", "priority", "request_id", "return_token_ids",
    "logprob_token_ids", "include_reasoning", "continue_final_message", "add_special_tokens", "documents",
    "truncate_prompt_tokens", "truncation_side", "prompt_embeds", "media_io_kwargs", "mm_processor_kwargs",
    "return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text", "return_mm_kwargs",
    "routed_experts_prompt_start", "session_id", "cache_salt", "kv_transfer_params", "ec_transfer_params",
    "stream_interval",
))
# fmt: on
"""Fields of a request body that say nothing of the law of a token: the engine's own matter."""
_CHOICES = "add a request for each choice"
_BEAMS = "the sampler draws, and searches no beams"
_GRAMMAR = "pass a grammar's masks as token_bitmask"
_NEUTRAL_OPENAI: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), _CHOICES),
    "best_of": ((1,), _CHOICES),
    "response_format": (({"type": "text"},), _GRAMMAR),
    "structured_outputs": ((), _GRAMMAR),
    "use_beam_search": ((False,), _BEAMS),
    "length_penalty": ((1,), _BEAMS),
    "bad_words": (((),), "a sampler sees no text: bad_words_token_ids"),
    "watermarking": ((False,), "watermark_tokens is the watermark of the sampler"),
    "thinking_token_budget": ((-1,), "the engine must count the tokens of a thought"),
    "eos_token_id": ((), "it is the model's: from_openai(body, eos_token_id=...)"),
}
"""Fields of a request body that a sampler cannot honour, the values that ask for nothing, and a way out."""


def generation_config_fields(config: Any, prompt_len: int | None = None) -> dict[str, Any]:
    """The parameters that ``generate`` of transformers would draw with, as arguments of ``SamplingParams``.

    Args:
        config: a GenerationConfig, or anything with its fields; one that is missing or None has the default of
            ``generate``. ``renormalize_logits`` and fields of beams and lengths do not change the law of a token.
        prompt_len: tokens of the prompt, which ``min_length`` counts.

    Raises:
        ValueError: a field that changes the law in a way that the sampler does not have.
    """
    is_greedy = _value(config, "do_sample", False) is not True
    neutral = _NEUTRAL if is_greedy else _NEUTRAL | _NEUTRAL_FILTERS
    _check_neutral(config, neutral, "leave it out, or pass its processor in logits_processor to run it before")
    _check_refused(config, _PER_SEQUENCE)
    stops = _ids(_value(config, "eos_token_id", ()))
    drawn = {
        "temperature": _value(config, "temperature", 1.0),
        "top_k": _value(config, "top_k", DEFAULT_TOP_K),
        "top_p": _value(config, "top_p", 1.0),
        "min_p": _value(config, "min_p", 0.0),
        "typical_p": _value(config, "typical_p", 1.0),
    }
    if not is_greedy and drawn["typical_p"] != 1 and (drawn["top_k"], drawn["top_p"], drawn["min_p"]) != (0, 1, 0):
        raise ValueError(
            f"typical_p must be 1 beside top_k, top_p and min_p, got {drawn['typical_p']}; generate applies it behind "
            "them, a sampler before: top_k=0, top_p=1, min_p=0"
        )
    words = [list(_ids(word)) for word in _value(config, "bad_words_ids", ())]
    return {
        **({"temperature": 0.0} if is_greedy else drawn),
        "repetition_penalty": _value(config, "repetition_penalty", 1.0),
        "repetition_scope": "all",
        "logit_bias": _biases(config),
        "bad_words_token_ids": [word for word in words if word not in [[stop] for stop in stops]],
        "bad_words_scope": "all",
        "min_tokens": _min_tokens(config, prompt_len) if stops else 0,
        "stop_token_ids": stops,
    }


def openai_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a chat or completions request, as arguments of ``SamplingParams``.

    Args:
        body: with OpenAI's fields, and every parameter of ``SamplingParams`` but ``eos_token_id`` by its own name, as
            vLLM and llama.cpp have some; -1 too switches ``top_k`` and ``top_n_sigma`` off. llama.cpp's
            ``dry_penalty_last_n`` is ``dry_range``, where -1 looks at all tokens; breakers of DRY are token ids. A
            mapping ``vllm_xargs`` may hold fields too. None is a field that is not set. Fields of the engine, from
            ``model`` to ``max_tokens`` and ``logprobs``, are passed over.

    Raises:
        TypeError: no mapping; stop tokens that are no ints.
        ValueError: a field that the sampler does not have; ``stop`` as text; more than one choice.
    """
    if not isinstance(body, Mapping):
        raise TypeError(f"body must be a mapping, got {body!r}; json.loads(text)")
    fields = _given_fields(body)
    _check_refused(fields, _NEUTRAL_OPENAI)
    given = {name: value for name, value in fields.items() if name not in _NEUTRAL_OPENAI}
    if "dry_penalty_last_n" in given:
        _check_neutral(given, {"dry_range": ()}, "dry_penalty_last_n says the same")
        given |= _dry_range(given.pop("dry_penalty_last_n"))
    stops = [*_stops(given.pop("stop", ())), *_sequence("stop_token_ids", given.pop("stop_token_ids", ()))]
    unknown = sorted(set(given) - set(_OPENAI), key=str)
    if unknown:
        raise ValueError(f"{unknown[0]} must be left out, got {given[unknown[0]]!r}; the sampler has no such parameter")
    given |= {name: 0 for name in ("top_k", "top_n_sigma") if given.get(name) == -1}
    return {**given, "stop_token_ids": stops}


def _stops(stop: object) -> list[object]:
    """The token ids of ``stop``: one, or several.

    Raises:
        TypeError: no ints.
        ValueError: text.
    """
    stops: list[object] = [stop] if isinstance(stop, str | Integral) else _sequence("stop", stop)
    if any(isinstance(each, str) for each in stops):
        raise ValueError(f"stop must be token ids, got {stop!r}; the engine must look for text, a sampler sees none")
    if any(isinstance(each, bool) or not isinstance(each, Integral) for each in stops):
        raise TypeError(f"stop must be token ids, got {stop!r}; an int or [id, ...]")
    return stops


def _sequence(name: str, values: object) -> list[object]:
    """The values of a sequence.

    Raises:
        TypeError: something else.
    """
    words = f"{name} must be a sequence of ints, got {values!r}; [id, ...]"
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(words)
    try:
        return list(values)
    except TypeError:  # such as an array without dimensions
        raise TypeError(words) from None


def _dry_range(last_n: object) -> dict[str, Any]:
    """``dry_range`` for llama.cpp's ``dry_penalty_last_n``, of which -1 is all tokens and 0 switches DRY off."""
    return {"dry_multiplier": 0.0} if last_n == 0 else {"dry_range": 0 if last_n == -1 else last_n}


def _given_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are set and not the engine's, those in ``vllm_xargs`` among them.

    Raises:
        TypeError: ``vllm_xargs`` is no mapping.
        ValueError: a field is set twice.
    """
    given = {name: value for name, value in body.items() if value is not None and name not in _ENGINES}
    further = given.pop("vllm_xargs", {})
    if not isinstance(further, Mapping):
        raise TypeError(f"vllm_xargs must be a mapping, got {further!r}; {{name: value}}")
    twice = sorted(set(given) & set(further))
    if twice:
        raise ValueError(f"{twice[0]} must be given once, got it in vllm_xargs too; leave one out")
    return {**given, **{name: value for name, value in further.items() if value is not None}}


def _check_refused(holder: Any, refused: Mapping[str, tuple[tuple[object, ...], str]]) -> None:
    """Raise unless fields ask for nothing, each with the values that do and a way out.

    Raises:
        ValueError: a field that asks for something.
    """
    for name, (values, way_out) in refused.items():
        _check_neutral(holder, {name: values}, way_out)


def _check_neutral(holder: Any, neutral: Mapping[str, tuple[object, ...]], way_out: str) -> None:
    for name, values in neutral.items():
        value = _value(holder, name, None)
        if value is not None and value not in values and _as_tuple(value) not in values:
            meant = " or ".join(repr(each) for each in values if each != ()) or "None"
            raise ValueError(f"{name} must be {meant} here, got {value!r}; {way_out}")


def _as_tuple(value: object) -> object:
    """A list as a tuple, so that it compares with one; another value as it is."""
    return tuple(value) if isinstance(value, list) else value


def _value(holder: Any, name: str, default: Any) -> Any:
    """A field of an object or a mapping; the default where it is missing or None."""
    found = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
    return default if found is None else found


def _ids(value: Any) -> tuple[Any, ...]:
    """One token id, or several in a sequence or a tensor, as a tuple."""
    found = value.tolist() if hasattr(value, "tolist") else value
    return tuple(found) if isinstance(found, Iterable) and not isinstance(found, str) else (found,)


def _biases(config: Any) -> dict[Any, float]:
    """``sequence_bias`` of single tokens, and -inf for ``suppress_tokens``."""
    given = _value(config, "sequence_bias", {})
    pairs = given.items() if isinstance(given, Mapping) else given
    made = {}
    for sequence, bias in pairs:
        if len(sequence) != 1:
            raise ValueError(
                f"sequence_bias must be of single tokens, got {tuple(sequence)}; pass SequenceBiasLogitsProcessor in "
                "logits_processor to run it before"
            )
        made[sequence[0]] = float(bias)
    return {**made, **dict.fromkeys(_ids(_value(config, "suppress_tokens", ())), -math.inf)}


def _min_tokens(config: Any, prompt_len: int | None) -> Any:
    """``min_new_tokens``, which goes before ``min_length``."""
    new, total = _value(config, "min_new_tokens", None), _value(config, "min_length", 0)
    if new is not None or not total:
        return 0 if new is None else new
    if prompt_len is None:
        raise ValueError(f"min_length must come with prompt_len, which it counts, got {total}; or set min_new_tokens")
    return max(0, total - prompt_len)
