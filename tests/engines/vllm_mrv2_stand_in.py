"""Stand-ins for what vLLM's V2 samplers hold, on the CPU, where vLLM's own need a GPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
