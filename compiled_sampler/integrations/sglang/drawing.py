"""SGLang's Sampler with the draw of this library; its own work on logits, logprobs and ranks stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.layers import sampler as stock
from sglang.srt.runtime_context import get_spec
from torch import Tensor

from compiled_sampler import functional
from compiled_sampler.modes import narrow_mode


class CompiledSampler(stock.Sampler):  # type: ignore[misc]
    """Draws by ``functional.sample``: parameters, seeds and positions are rows of SGLang's tensors."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self._backend = backend
        algorithm = get_spec().speculative_algorithm
        if algorithm is not None:
            raise ValueError(
                f"speculative_algorithm must be None, got {algorithm!r}; SGLang verifies drafts without its Sampler"
            )
        if self.rl_on_policy_target is not None:
            raise ValueError(
                f"rl_on_policy_target must be None, got {self.rl_on_policy_target!r}; its law is of bfloat16 logprobs"
            )

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[Any],
        positions: Tensor,  # of the last token that each row read
    ) -> Tensor:
        """One token for every row, int32 ``[B]``; a row without any token gets 0, as SGLang's argmax gives."""
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        arguments = law_arguments(sampling_info)
        drawn = functional.sample(
            logits,
            seeds=_seeds(sampling_info, logits),
            positions=drawn_positions(positions),
            backend=self._backend,
            **arguments,
        )
        token_ids = drawn.token_ids.clamp(min=0).to(torch.int32)
        if return_logprob:
            self.output_logprob_processor.compute_logprobs(
                _logprobs(logits, sampling_info), top_logprobs_nums, token_ids_logprobs, token_ids
            ).write_output_to(logits_output)
        if any(sampling_info.return_sampling_masks or []):
            law = functional.probs(logits, backend=self._backend, **arguments)
            ids = torch.arange(law.shape[1], device=law.device).expand_as(law)
            support = (ids, law, law > 0, law)  # of the law that the tokens were drawn from
            self._attach_sampling_mask_to_output(logits_output, sampling_info, token_ids.long(), support)
        self._sync_token_ids_across_tp(token_ids, sampling_info)
        return token_ids


def _seeds(info: Any, logits: Tensor) -> Tensor:
    """The seed of each row, int64 ``[B]``; zeros where all are greedy."""
    if info.sampling_seed is not None:
        return info.sampling_seed  # type: ignore[no-any-return]
    if not info.is_all_greedy:
        raise RuntimeError("sampling_seed must be set; load the plugin, or use --enable-deterministic-inference")
    return torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)


def _logprobs(logits: Tensor, info: Any) -> Tensor:
    """The logprobs that SGLang returns, float32 ``[B, V]``: of the temperature, without filters, row by row."""
    # SGLang leaves the temperature out where all rows of a batch are greedy; here a row's logprobs are its own.
    scaled = logits if stock.SGLANG_RETURN_ORIGINAL_LOGPROB else logits / info.temperatures
    return torch.log_softmax(scaled, -1, dtype=torch.float32)


LEAST_TEMPERATURE = float(np.nextafter(np.float32(1e-5), np.float32(1)))
MOST_TEMPERATURE = float(np.nextafter(np.float32(1e30), np.float32(1)))
"""The sampler's limits, as float32 holds them inside; SGLang takes temperatures below 1e-6 as greedy, and any other."""


def drawn_positions(positions: Tensor) -> Tensor:
    """The position of the token that each row draws, ``[B]``, from that of the last token that it read."""
    # Here alone positions of SGLang become those of the sampler: it gives that of a decode's input token, and behind a
    # prompt or a part of it the length less one.
    return positions + 1


def law_arguments(info: Any) -> dict[str, Any]:
    """The parameters of the rows, and the mode that serves them, as ``sample`` and ``probs`` take them."""
    if info.is_all_greedy:
        return {"temperature": 0.0}
    # Filters that no row has are numbers, which makes the step cheaper and changes no token.
    return {
        "temperature": info.temperatures.view(-1).clamp(LEAST_TEMPERATURE, MOST_TEMPERATURE),
        "top_k": info.top_ks if info.need_top_k_sampling else 0,
        "top_p": info.top_ps if info.need_top_p_sampling else 1.0,
        "min_p": info.min_ps if info.need_min_p_sampling else 0.0,
        "mode": narrow_mode(getattr(info, "max_top_k", None)) if info.need_top_k_sampling else None,
        "top_p_base": "all",  # as SGLang's filters are ("joint")
    }
