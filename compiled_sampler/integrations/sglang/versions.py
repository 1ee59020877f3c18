"""Which versions of SGLang the adapter fits: by number, and by what it calls and what it makes."""

from __future__ import annotations

from compiled_sampler.integrations.engine_interface import Find, Interface, Supported, check_supported

OLDEST, NEWEST = "0.5.23", "0.5.23"
"""The versions whose published source the tests passed with; a newer one is taken while it has what is called."""

_SAMPLER = "sglang.srt.layers.sampler:Sampler"
_BATCH_INFO = "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo"
# fmt: off
INTERFACE = Interface(
    parameters={
        f"{_SAMPLER}.forward": (
            "self", "logits_output", "sampling_info", "return_logprob", "top_logprobs_nums", "token_ids_logprobs",
            "positions", "logprob_logits",
        ),
        f"{_SAMPLER}._preprocess_logits": ("self", "logits", "sampling_info"),
        f"{_SAMPLER}._sync_token_ids_across_tp": ("self", "batch_next_token_ids", "sampling_info"),
        f"{_SAMPLER}._build_sampling_mask_output": (
            "self", "batch_next_token_ids", "sampling_mask_capture", "support_capture_indices",
        ),
        "sglang.srt.layers.sampler:register_sampler_backend": ("backend", "factory"),
        "sglang.srt.layers.logprob_processor:OutputLogprobProcessor.compute_logprobs": (
            "self", "logprobs", "top_logprobs_nums", "token_ids_logprobs", "batch_next_token_ids",
        ),
        "sglang.srt.plugins.hook_registry:HookRegistry.register": ("target", "hook", "hook_type", "source"),
        f"{_BATCH_INFO}.from_schedule_batch": ("batch", "vocab_size"),
    },
    fields={
        "sglang.srt.layers.sampler:_SamplingMaskCapture": ("weights", "token_ids", "selected_weight", "batch_rows"),
        "sglang.srt.layers.logits_processor:LogitsProcessorOutput": ("next_token_logits", "sampling_mask_output"),
        _BATCH_INFO: (
            "temperatures", "top_ks", "top_ps", "min_ps", "sampling_seed", "is_all_greedy", "need_top_k_sampling",
            "need_top_p_sampling", "need_min_p_sampling", "max_top_k", "sampling_mask_batch_indices",
            "sampling_support_logprobs_capture_indices",
        ),
    },
    attributes={
        f"{_SAMPLER}.__init__": ("output_logprob_processor", "rl_on_policy_target"),
        "sglang.srt.runtime_context:get_exec": (),
        "sglang.srt.runtime_context:get_spec": (),
        "sglang.srt.runtime_context:get_device": (),
    },
)
# fmt: on


SUPPORTED = Supported("SGLang", OLDEST, f"install a version from {OLDEST} to {NEWEST}", INTERFACE)


def check_version(version: str, find: Find | None = None) -> None:
    """Raise ImportError unless the adapter fits a version of SGLang."""
    check_supported(SUPPORTED, version, find)
