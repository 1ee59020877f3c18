"""Which versions of TokenSpeed the adapter fits: by number, and by what it calls and what it makes."""

from __future__ import annotations

from compiled_sampler.integrations.engine_interface import Find, Interface, Supported, check_supported

OLDEST, NEWEST = "0.1.1", "0.1.1"
"""The versions whose published source the tests passed with; a newer one is taken while it has what is called."""

_SAMPLING = "tokenspeed.runtime.sampling"
_BACKEND = f"{_SAMPLING}.backends.base:SamplingBackend"
EXECUTOR = "tokenspeed.runtime.execution.model_executor:ModelExecutor"
PARAMS = f"{_SAMPLING}.sampling_params:SamplingParams"
# fmt: off
INTERFACE = Interface(
    parameters={
        f"{_SAMPLING}.registry:register_backend": ("name", "cls"),
        f"{_BACKEND}.__init__": ("self", "config"),
        f"{_BACKEND}.prepare_step": (
            "self", "request_ids", "request_pool_indices", "sampling_params_list", "num_tokens_per_req",
        ),
        f"{_BACKEND}._prepare_step_hook": ("self", "num_tokens_per_req", "bs", "request_pool_indices"),
        f"{_BACKEND}._reset_slot": ("self", "pool_idx", "sp"),
        f"{_BACKEND}.prepare_capture": ("self", "bs", "num_tokens_per_req"),
        f"{_BACKEND}.prepare_capture_variant": ("self", "bs", "num_tokens_per_req", "variant"),
        f"{_BACKEND}.cuda_graph_capture_variants": ("self", "num_tokens_per_req"),
        f"{_BACKEND}.cuda_graph_replay_variant": ("self", "num_tokens_per_req"),
        f"{_BACKEND}.sample": ("self", "logits_output", "sampling_info"),
        f"{_BACKEND}.verify": ("self", "logits_output", "sampling_info", "candidates", "tree"),
        f"{_BACKEND}.maybe_broadcast": ("self", "tensors"),
        f"{_BACKEND}.broadcast_verify_outputs": ("self",),
        f"{_BACKEND}._offsets_pool_for_kernels": ("self", "sampling_info"),
        f"{_SAMPLING}.utils:gather_token_logprobs": ("logits", "tokens", "logprob_order"),
        f"{_SAMPLING}.utils:nan_guard_logits": ("logits", "enable_nan_detection"),
        f"{PARAMS}.verify": ("self", "vocab_size"),
        f"{PARAMS}.requested_features": ("self",),
    },
    fields={
        f"{_SAMPLING}.backends.base:SamplingBackendConfig": (
            "enable_speculative_sampling", "logprob_order", "enable_nan_detection", "enable_output_logprobs", "max_bs",
            "max_draft_tokens_per_req", "max_req_pool_size", "vocab_size", "device",
        ),
        f"{_SAMPLING}.sampling_batch_info:SamplingBatchInfo": (
            "vocab_mask", "apply_vocab_mask", "req_pool_indices", "valid_cache_lengths", "batch_row_offset",
        ),
    },
    attributes={
        f"{_BACKEND}._allocate_verify_outputs": ("_predict_buf", "_accept_length_buf", "_accept_index_buf"),
        f"{EXECUTOR}.__init__": ("sampling_backend", "input_buffers"),
        "tokenspeed.runtime.execution.input_buffer:InputBuffers.__init__": ("seq_lens_buf",),
    },
)
# fmt: on


SUPPORTED = Supported("TokenSpeed", OLDEST, f"install a version from {OLDEST} to {NEWEST}", INTERFACE)


def check_version(version: str, find: Find | None = None) -> None:
    """Raise unless the adapter fits a version of TokenSpeed; arguments and errors as ``check_supported``."""
    check_supported(SUPPORTED, version, find)
