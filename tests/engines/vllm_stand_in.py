"""Stand-ins for vLLM's SamplingParams and model runner, and for what its V2 samplers hold, on the CPU.

The tests of the contracts hold their fields to vLLM's.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.integrations.vllm.engine_checks import BUILTIN_PROCESSORS
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
        """The defaults, but for what is given."""
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


SLOTS = 12


def column(dtype: torch.dtype, value: float, count: int = SLOTS) -> Any:
    """A UvaBackedTensor: ``np`` and ``gpu`` are one memory."""
    there = torch.full((count,), value, dtype=dtype)
    return SimpleNamespace(np=there.numpy(), gpu=there)


def states_of(vocab_size: int, requests: dict[int, dict[str, Any]], states: Any = None) -> Any:
    """SamplingStates of vLLM with requests in slots; float32 numbers.

    Args:
        vocab_size: V.
        requests: parameters by slot; those that are left out filter nothing.
        states: an object to set the fields of; None makes one.
    """
    made = SimpleNamespace() if states is None else states
    made.vocab_size = vocab_size
    made.temperature = column(torch.float32, 1.0)
    made.top_k = column(torch.int32, vocab_size)
    made.top_p = column(torch.float32, 1.0)
    made.min_p = column(torch.float32, 0.0)
    made.seeds = column(torch.int64, 0)
    for slot, law in requests.items():
        for name, value in law.items():
            getattr(made, "seeds" if name == "seed" else name).np[slot] = value
    return made


class AddsSlot:
    """An edit of vLLM: adds something to one token of each row."""

    def apply(self, logits: Tensor, context: Any) -> Tensor:
        """The edited logits, in place."""
        logits[:, 3] += context.expanded_idx_mapping.float()
        return logits


def sampler_of(states: Any, *, edits: bool = False, sampler: Any = None, **changed: Any) -> Any:
    """The V2 Sampler of vLLM, as far as it is read.

    Args:
        states: its SamplingStates.
        edits: whether its requests have some.
        sampler: an object to set the fields of; None makes one.
        changed: fields.
    """
    made = SimpleNamespace() if sampler is None else sampler
    fields = {
        "sampling_states": states,
        "logits_processors": [AddsSlot()],
        "thinking_budget_state": SimpleNamespace(apply=lambda logits, context: logits[:, 5].sub_(1.0)),
        "needs_logits_processing": np.full(SLOTS, edits),
        "return_sampling_mask": False,
        "logprobs_mode": "raw_logprobs",
        **changed,
    }
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def context_of(slots: list[int], counts: list[int], first_positions: list[int], input_ids: Tensor) -> dict[str, Any]:
    """The fields of LogitsContext for requests with so many rows each; positions are of input tokens."""
    rows = torch.tensor(counts)
    local = torch.cat([torch.arange(count) for count in counts])
    return {
        "expanded_idx_mapping": torch.tensor(slots).repeat_interleave(rows),
        "idx_mapping": torch.tensor(slots),
        "idx_mapping_np": np.array(slots),
        "expanded_local_pos": local.to(torch.int32),
        "input_ids": input_ids,
        "pos": torch.tensor(first_positions).repeat_interleave(rows) + local,
        "seq_lens_upper_bound_np": np.array(first_positions) + 1,
    }
