"""vLLM's sampling parameters as those of a sampler, and the names of what a sampler does not have; needs no vLLM."""

from __future__ import annotations

from typing import Any

from compiled_sampler.edits import PARAMETERS
from compiled_sampler.edits.edit_spec import EditSizes
from compiled_sampler.edits.names import reading
from compiled_sampler.engine.requests.edit_layout import check_fits
from compiled_sampler.integrations.request_seeds import seed_of
from compiled_sampler.integrations.vllm.settings import Settings
from compiled_sampler.params import SamplingParams

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

ENGINE_VOCAB = 2**22
"""A bound of every vocabulary, for a check without one."""


def sampler_params(params: Any, request_id: str, salt: int) -> SamplingParams:
    """The parameters of a request."""
    # The tokens that end a request are vLLM's matter; here ``min_tokens`` alone needs them.
    stops = params._all_stop_token_ids if params.min_tokens else ()
    own = {name: value for name, value in (params.extra_args or {}).items() if name in OWN}
    return SamplingParams(
        temperature=params.temperature,
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed_of(request_id, salt) if params.seed is None else params.seed,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words_token_ids=params._bad_words_token_ids,
        min_tokens=params.min_tokens if stops else 0,
        stop_token_ids=sorted(stops),
        **own,
    )


def unsupported(
    params: Any, vocab_size: int = ENGINE_VOCAB, settings: Settings | None = None, *, has_tokens: bool = True
) -> str | None:
    """What a request asks for that it cannot have, in one line; None for nothing."""
    for name, reason in _refused(settings or Settings()).items():
        if name in (params.extra_args or {}):
            return f"{name} must be left out of extra_args, got {params.extra_args[name]!r}; {reason}"
    default = None
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if name in REFUSED and value not in REFUSED[name]:
            return f"{name} must be {REFUSED[name][0]} here, got {value!r}; leave it out"
        if name not in REFUSED and name not in MAPPED and name not in ENGINES:
            default = type(params)() if default is None else default
            if value != getattr(default, name):
                return f"{name} must be left out, got {value!r}; the adapter does not know it"
    try:
        own = sampler_params(params, "", 0).for_vocab(vocab_size)
        check_fits(own, SIZES, vocab_size)
    except (TypeError, ValueError) as error:
        return str(error)
    if not has_tokens and reading(own.edits):
        return f"the prompt must be of tokens for {' and '.join(reading(own.edits))}, got embeddings; pass token ids"
    return None


def _refused(settings: Settings) -> dict[str, str]:
    """The parameters of ``extra_args`` that an engine with such settings refuses, each with the reason."""
    if settings.v2 == "untested":
        return dict.fromkeys(OWN, "in a V2 runner edits are vLLM's")
    if settings.rule == "match":
        return {}
    return {"watermark_tokens": f"a watermark holds under rule=match, not under {settings.rule}"}


def ending_token(params: Any) -> int:
    """The token of a row where every token is masked, so that its request ends: eos, another stop token, or 0."""
    if params._eos_token_id is not None:
        return int(params._eos_token_id)
    return min(params._all_stop_token_ids, default=0)
