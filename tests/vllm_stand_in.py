"""A stand-in for vLLM's SamplingParams, for tests without vLLM; test_vllm_contract.py holds its fields to vLLM's."""

from typing import Any

from compiled_sampler.integrations.vllm.requests import REFUSED

DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": None,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "_bad_words_token_ids": None,
    "min_tokens": 0,
    "_all_stop_token_ids": set(),
    "_eos_token_id": None,
    "logprobs": None,
    "max_tokens": 16,
    "structured_outputs": None,
    **{name: values[0] for name, values in REFUSED.items()},
    "brand_new": 0,
}


class Given:
    """The fields that vLLM's SamplingParams have, and one that nobody knows."""

    __struct_fields__ = tuple(DEFAULTS)

    def __init__(self, **given: Any) -> None:
        """The defaults, but for what is given."""
        vars(self).update({**DEFAULTS, **given})
