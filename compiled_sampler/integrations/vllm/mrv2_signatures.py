"""The signatures of vLLM's V2 samplers, and what is called instead; needs vLLM."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

from compiled_sampler.integrations.vllm import mrv2_drawing


def sample(
    sampler: Any,
    backend: str,
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    idx_mapping: Tensor,
    idx_mapping_np: np.ndarray,
    pos: Tensor,
    input_ids: Tensor,
    expanded_local_pos: Tensor,
    seq_lens_upper_bound_np: np.ndarray,
    return_logprobs: bool = False,
) -> tuple[Tensor, Tensor]:
    """``Sampler.sample``: tokens ``[R]`` and the logits for logprobs ``[R, V]``; arguments as vLLM has them."""
    context = LogitsContext(
        expanded_idx_mapping=expanded_idx_mapping,
        idx_mapping=idx_mapping,
        idx_mapping_np=idx_mapping_np,
        expanded_local_pos=expanded_local_pos,
        input_ids=input_ids,
        pos=pos,
        seq_lens_upper_bound_np=seq_lens_upper_bound_np,
    )
    return mrv2_drawing.sample(sampler, logits, context, backend, return_logprobs=return_logprobs)


def verify(
    verifier: Any,
    backend: str,
    logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    pos: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    idx_mapping_np: np.ndarray,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    seq_lens_upper_bound_np: np.ndarray,
    verify_draft_sampled: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """``RejectionSampler._verify``: logits for logprobs, tokens ``[N, K+1]``, and how many; arguments as vLLM's."""
    context = LogitsContext(
        expanded_idx_mapping=expanded_idx_mapping,
        idx_mapping=idx_mapping,
        idx_mapping_np=idx_mapping_np,
        expanded_local_pos=expanded_local_pos,
        input_ids=draft_sampled,
        pos=pos,
        seq_lens_upper_bound_np=seq_lens_upper_bound_np,
    )
    return mrv2_drawing.verify(verifier, logits, context, cu_num_logits, verify_draft_sampled, backend)
