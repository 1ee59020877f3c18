"""vLLM's sampling parameters as those of a sampler, what a sampler does not have, and the settings of the adapter.

The settings travel to an engine's processes as one environment variable. Nothing here needs vLLM.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, fields
from typing import Any

from compiled_sampler.edits import PARAMETERS
from compiled_sampler.edits.edit_spec import EditSizes
from compiled_sampler.edits.names import reading
from compiled_sampler.engine.requests.edit_slots import check_fits
from compiled_sampler.integrations.engine_interface import seed_of
from compiled_sampler.params import SamplingParams
from compiled_sampler.scalars import check_choice

SIZES = EditSizes(biases=1024, stops=64, bad_words=64, bad_word_len=16)
"""Room for the edits of a request: 9 KB a slot, besides a bit for each token."""

# fmt: off
MAPPED = frozenset((
    "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "_bad_words_token_ids", "min_tokens", "_all_stop_token_ids",
    "_eos_token_id", "logprobs", "extra_args",
))
"""Fields of vLLM's SamplingParams that the sampler takes."""
OWN = frozenset(name for name, parameter in PARAMETERS.items() if not parameter.in_vllm)
"""The sampler's parameters that vLLM has no field for; ``extra_args`` brings them. Its other keys are vLLM's matter."""
ENGINES = frozenset((
    "n", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "prompt_logprobs", "prompt_logprob_token_ids",
    "prompt_logprob_start", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone", "output_text_buffer_length",
    "structured_outputs", "skip_reading_prefix_cache", "repetition_detection",
    "routed_experts_prompt_start", "_watermarking_skipped",
))
"""Fields that are vLLM's own matter, before or behind the draw. It writes a grammar's mask into the logits before."""
# fmt: on
REFUSED: dict[str, tuple[object, ...]] = {
    "watermarking": (None, False),
    "logprob_token_ids": (None, []),
    "thinking_token_budget": (None,),
    "trace_decode_token_ids": (None,),
}
"""Fields that change the draw or what is returned in a way that the adapter does not have, and values that do not."""

_EDITS: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": None,
    "allowed_token_ids": None,
}
ENGINE_VOCAB = 2**22
"""A bound of every vocabulary, for a check without one."""

VARIABLE = "COMPILED_SAMPLER_VLLM"
"""Environment variable that switches the plugin on: ``1``, or settings such as ``rule=rejection,backend=eager``."""
_OFF, _ON = ("", "0"), "1"
CHOICES: dict[str, tuple[str, ...]] = {
    "on_unsupported": ("error", "stock"),
    "rule": ("match", "rejection", "block"),
    "backend": ("auto", "graph", "compiled", "eager", "reference"),
    "warmup": ("start", "off"),
}


def sampler_params(params: Any, request_id: str, salt: int) -> SamplingParams:
    """The parameters of a request."""
    # Edits at their defaults are left out: SamplingParams then has nothing to check. The tokens that end a request are
    # vLLM's matter; here ``min_tokens`` alone needs them.
    edits = {name: value for name, default in _EDITS.items() if (value := getattr(params, name)) != default}
    if params._bad_words_token_ids:
        edits["bad_words_token_ids"] = params._bad_words_token_ids
    if params.min_tokens and params._all_stop_token_ids:
        edits |= {"min_tokens": params.min_tokens, "stop_token_ids": sorted(params._all_stop_token_ids)}
    if params.extra_args:
        edits |= {name: value for name, value in params.extra_args.items() if name in OWN}
    return SamplingParams(
        temperature=params.temperature,
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed_of(request_id, salt) if params.seed is None else params.seed,
        **edits,
    )


def unsupported(
    params: Any, vocab_size: int = ENGINE_VOCAB, settings: Settings | None = None, *, has_tokens: bool = True
) -> str | None:
    """What a request asks for that it cannot have, in one line; None for nothing."""
    return checked_params(params, "", 0, vocab_size, settings or Settings(), has_tokens=has_tokens)[1]


def checked_params(
    params: Any, request_id: str, salt: int, vocab_size: int, settings: Settings, *, has_tokens: bool = True
) -> tuple[SamplingParams | None, str | None]:
    """The parameters of a request that can be drawn, or in one line what it asks for that it cannot have."""
    reason = _refused_field(params)
    if reason is not None:
        return None, reason
    if params.extra_args:
        for name, reason in _refused(settings).items():
            if name in params.extra_args:
                return None, f"{name} must be left out of extra_args, got {params.extra_args[name]!r}; {reason}"
    try:
        own = sampler_params(params, request_id, salt).for_vocab(vocab_size)
        edits = own.edits
        if edits:
            check_fits(own, edits, SIZES, vocab_size)
    except (TypeError, ValueError) as error:
        return None, str(error)
    if not has_tokens and reading(edits):
        return None, f"the prompt must be of tokens for {' and '.join(reading(edits))}, got embeddings; pass token ids"
    return own, None


def _refused_field(params: Any) -> str | None:
    """The first field that asks for what the adapter does not have or does not know, in one line; None for none."""
    kind: Any = type(params)
    names, defaults = _fields_of_no_use(kind)
    values = tuple(map(params.__getattribute__, names))
    for name, value, default in zip(names, values, defaults, strict=True) if values != defaults else ():
        if value not in REFUSED.get(name, (default,)):
            known = "leave it out" if name in REFUSED else "the adapter does not know it"
            return f"{name} must be {default} here, got {value!r}; {known}"
    return None


@functools.cache
def _fields_of_no_use(kind: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The fields of vLLM's parameters that must be at their defaults, and these."""
    names = tuple(name for name in kind.__struct_fields__ if name not in MAPPED and name not in ENGINES)
    default = kind()
    return names, tuple(getattr(default, name) for name in names)


def _refused(settings: Settings) -> dict[str, str]:
    """The parameters of ``extra_args`` that an engine with such settings refuses, each with the reason."""
    if settings.rule == "match":
        return {}
    return {"watermark_tokens": f"a watermark holds under rule=match, not under {settings.rule}"}


def ending_token(params: Any) -> int:
    """The token of a row where every token is masked, so that its request ends: eos, another stop token, or 0."""
    if params._eos_token_id is not None:
        return int(params._eos_token_id)
    return min(params._all_stop_token_ids, default=0)


@dataclass(frozen=True)
class Settings:
    """What ``install`` was told; it says what the fields mean."""

    on_unsupported: str = "error"
    rule: str = "match"
    backend: str = "auto"
    warmup: str = "start"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices, "leave it out")

    @property
    def text(self) -> str:
        """The value of the environment variable, from which ``settings_of_text`` makes the same settings."""
        settings = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return ",".join(f"{name}={value}" for name, value, default in settings if value != default) or _ON


def warn_of_v2(value: str) -> None:
    """Say that ``v2="untested"`` says nothing any more; no other value was ever taken for an engine that draws."""
    check_choice("v2", value, ("untested",), "leave it out: V2 runners draw here like V1 runners")
    warnings.warn("v2='untested' is the default now; leave it out", DeprecationWarning, stacklevel=3)


def settings_of_text(text: str) -> Settings | None:
    """The settings that an environment variable holds; None for ``0`` and for nothing."""
    if text in _OFF:
        return None
    if text == _ON:
        return Settings()
    given = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name == "v2":
            warn_of_v2(value)
            continue
        if name not in CHOICES:
            raise ValueError(
                f"{VARIABLE} must be 1 or settings of {tuple(CHOICES)}, got {text!r}; rule=match,backend=auto"
            )
        given[name] = value
    return Settings(**given)
