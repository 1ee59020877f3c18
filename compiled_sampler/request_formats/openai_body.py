"""Sampling parameters out of a request body of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from compiled_sampler.edits import PARAMETERS
from compiled_sampler.request_formats import check_known, check_neutral, check_refused, value_of

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
            check_neutral(given, {name: ()}, f"{alias} says the same")
            given |= parameter.aliases[alias](given.pop(alias))
    stops = [*_stops(given.pop("stop", ())), *_sequence("stop_token_ids", given.pop("stop_token_ids", ()))]
    check_known(given, given, _OPENAI, "the sampler has no such parameter")
    given |= {name: off for name, off in _OFF_AT_MINUS_1.items() if given.get(name) == -1}
    return {**given, "stop_token_ids": stops}


def _check_tools(tools: object) -> None:
    """Raise where the arguments of a tool must follow its schema; what is no list of tools is the engine's matter."""
    for tool in tools if isinstance(tools, Sequence) else ():
        for holder in (tool, value_of(tool, "function", {})):
            check_neutral(holder, {"strict": (False,)}, f"in tools: {_GRAMMAR}")


def _stops(stop: object) -> list[object]:
    stops: list[object] = [stop] if isinstance(stop, str | Integral) else _sequence("stop", stop)
    if any(isinstance(each, str) for each in stops):
        raise ValueError(f"stop must be token ids, got {stop!r}; the engine must look for text, a sampler sees none")
    if any(isinstance(each, bool) or not isinstance(each, Integral) for each in stops):
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
