"""Stand-ins for vLLM's SamplingParams and model runner, and for what its V2 samplers hold, on the CPU.

The tests of the contracts hold their fields to vLLM's.
"""

from types import SimpleNamespace
from typing import Any

import torch

from compiled_sampler.integrations.vllm.parameters import REFUSED
from compiled_sampler.integrations.vllm.versions import BUILTIN_PROCESSORS

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
    "extra_args": None,
    "max_tokens": 16,
    "structured_outputs": None,
    **{name: values[0] for name, values in REFUSED.items()},
    "brand_new": 0,
}


class Given:
    """The fields that vLLM's SamplingParams have, and one that nobody knows."""

    __struct_fields__ = tuple(DEFAULTS)

    def __init__(self, **given: Any) -> None:
        vars(self).update({**DEFAULTS, **given})


def runner(**changed: Any) -> Any:
    """What a V1 model runner says of its engine, as it is by default but for what is changed."""
    model = {"logprobs_mode": "raw_logprobs", "return_sampling_mask": False, "is_diffusion": False}
    config = {"speculative_config": None, "watermark_config": None}
    processors = [type(name, (), {})() for name in BUILTIN_PROCESSORS]
    fields = {"logitsprocs": processors, "use_async_scheduling": False, **model, **config, **changed}
    batch = SimpleNamespace(logitsprocs=SimpleNamespace(all=fields["logitsprocs"]))
    named = SimpleNamespace(**{name: fields[name] for name in model})
    of_engine = SimpleNamespace(model_config=named, **{name: fields[name] for name in config})
    return SimpleNamespace(
        vllm_config=of_engine, input_batch=batch, use_async_scheduling=fields["use_async_scheduling"]
    )


def column(dtype: torch.dtype, value: float, count: int) -> Any:
    """A UvaBackedTensor: ``np`` and ``gpu`` are one memory."""
    there = torch.full((count,), value, dtype=dtype)
    return SimpleNamespace(np=there.numpy(), gpu=there)
