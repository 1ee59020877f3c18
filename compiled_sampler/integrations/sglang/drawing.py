"""SGLang's Sampler with the draw of this library; its own work on logits, logprobs and ranks stays."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers import sampler as stock
from sglang.srt.runtime_context import get_spec
from torch import Tensor

from compiled_sampler import functional
from compiled_sampler.integrations.sglang.row_arguments import drawn_positions, law_arguments, of_rows


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
        *,
        logprob_logits: Tensor | None = None,  # where a watermark has changed the others
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
            of = logits if logprob_logits is None else self._preprocess_logits(logprob_logits, sampling_info)
            self.output_logprob_processor.compute_logprobs(
                _logprobs(of, sampling_info), top_logprobs_nums, token_ids_logprobs, token_ids
            ).write_output_to(logits_output)
        self._sync_token_ids_across_tp(token_ids, sampling_info)
        if sampling_info.sampling_mask_batch_indices is not None:
            logits_output.sampling_mask_output = self._sampling_mask(logits, arguments, sampling_info, token_ids)
        return token_ids

    def _sampling_mask(self, logits: Tensor, arguments: dict[str, Any], info: Any, token_ids: Tensor) -> Any:
        """SGLang's SamplingMaskOutput, of the law that the tokens were drawn from."""
        rows = info.sampling_mask_batch_indices
        law = functional.probs(logits[rows], backend=self._backend, **of_rows(arguments, rows))
        capture = stock._SamplingMaskCapture(weights=law, token_ids=None, selected_weight=None, batch_rows=rows)
        return self._build_sampling_mask_output(token_ids, capture, info.sampling_support_logprobs_capture_indices)


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
