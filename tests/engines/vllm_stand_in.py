"""Stand-ins for vLLM's SamplingParams and model runner, and for what its V2 samplers hold, on the CPU.

The tests of the contracts hold their fields to vLLM's.
"""

from types import SimpleNamespace
from typing import Any

import torch

from compiled_sampler.integrations.vllm.parameters import REFUSED
from compiled_sampler.integrations.vllm.versions import BUILTIN_PROCESSORS

NONE = ("seed", "logit_bias", "allowed_token_ids", "_bad_words_token_ids", "_eos_token_id", "logprobs", "extra_args")
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty"), 0.0),
    **dict.fromkeys((*NONE, "structured_outputs")),
    **dict.fromkeys(("top_k", "min_tokens", "brand_new"), 0),
    "max_tokens": 16,
    "bad_words": [],
    "_all_stop_token_ids": set(),
    **{name: values[0] for name, values in REFUSED.items()},
}


class Given:
    """The fields that vLLM's SamplingParams have, and one that nobody knows."""

    __struct_fields__ = tuple(DEFAULTS)

    def __init__(self, **given: Any) -> None:
        vars(self).update({**DEFAULTS, **given})


def runner(num_drafts: int = 0, **changed: Any) -> Any:
    """What a V1 model runner with 4 requests and a vocabulary of 40 says of its engine, but for what is changed."""
    drafts = {"draft_sample_method": "greedy", "rejection_sample_method": "standard"}
    drafts |= {"num_speculative_tokens": num_drafts, "enable_adaptive_verification": False}
    model = {"logprobs_mode": "raw_logprobs", "return_sampling_mask": False, "is_diffusion": False}
    model |= {"seed": 3, "max_model_len": 32, "enable_trace_replay": False}
    config = {"speculative_config": SimpleNamespace(**drafts) if num_drafts else None, "watermark_config": None}
    parallel = {"enable_batch_sharded_sampling": False}
    rest = {"logitsprocs": [type(name, (), {})() for name in BUILTIN_PROCESSORS], "use_async_scheduling": False}
    fields = {**model, **config, **parallel, **rest, **changed}
    named = [SimpleNamespace(**{name: fields[name] for name in names}) for names in (config, model, parallel)]
    vars(named[0]).update(model_config=named[1], parallel_config=named[2])
    return SimpleNamespace(
        vllm_config=named[0],
        input_batch=SimpleNamespace(logitsprocs=SimpleNamespace(all=fields["logitsprocs"]), vocab_size=40),
        use_async_scheduling=fields["use_async_scheduling"],
        max_num_reqs=4,
        model=SimpleNamespace(compute_logits=lambda hidden: torch.zeros(len(hidden), 40, dtype=torch.bfloat16)),
    )


def column(dtype: torch.dtype, value: float, count: int) -> Any:
    """A UvaBackedTensor: ``np`` and ``gpu`` are one memory."""
    there = torch.full((count,), value, dtype=dtype)
    return SimpleNamespace(np=there.numpy(), gpu=there)
