"""Which versions of transformers the loops fit: by number, and by what they call."""

from __future__ import annotations

import transformers

from compiled_sampler.integrations.engine_interface import Find, Interface, Supported, check_supported

OLDEST, NEWEST = "5.17", "5.24"
"""The versions that the tests passed with; a newer one is taken while it has what is called."""

_MIXIN = "transformers:GenerationMixin"
_RUNNER = "transformers.generation.continuous_batching.model_runner:ModelRunner"
_PROCESSORS = "transformers.generation.continuous_batching.cb_logits_processors:ContinuousBatchingLogitsProcessorList"
# fmt: off
CALLED = Interface(
    passed={
        f"{_MIXIN}._prefill": ("input_ids", "generation_config", "model_kwargs", "is_first_iteration"),
        f"{_MIXIN}.prepare_inputs_for_generation": ("input_ids", "next_sequence_length"),
        f"{_MIXIN}._update_model_kwargs_for_generation": (
            "outputs", "model_kwargs", "is_encoder_decoder", "num_new_tokens",
        ),
        f"{_MIXIN}._has_unfinished_sequences": ("this_peer_finished", "synced_gpus", "device"),
        f"{_MIXIN}._optimize_model_for_decode": (),
        f"{_MIXIN}._valid_auto_compile_criteria": ("model_kwargs", "generation_config"),
    }
)
"""What the loops call."""

REPLACED = Interface(
    passed={
        f"{_RUNNER}.__init__": (
            "logit_processor", "cb_config", "inputs_and_outputs", "cache", "do_sample", "return_logprobs",
        ),
        f"{_RUNNER}._forward_process_and_sample": (
            "model", "batch_data", "carry_over_ids", "prev_output_ids", "output_ids",
        ),
        f"{_RUNNER}._capture_graph": ("forward_fn", "compute_stream", "args"),
        f"{_RUNNER}._sample": ("scores", "output_ids"),
        f"{_PROCESSORS}.__init__": ("logits_processor", "per_request_processors", "drop_unsupported_processors"),
        f"{_PROCESSORS}.check_kwargs": ("kwargs",),
        f"{_PROCESSORS}.fill_defaults": ("int32_tensor",),
        f"{_PROCESSORS}.prepare_tensor_args": ("requests_in_batch", "arg_storage"),
    }
)
"""What the classes of continuous batching have that ours stand for."""
# fmt: on


def check_version(interface: Interface, version: str = transformers.__version__, find: Find | None = None) -> None:
    """Raise ImportError unless a version of transformers has an interface."""
    way_out = f"pip install 'transformers>={OLDEST},<={NEWEST}'"
    check_supported(Supported("transformers", OLDEST, way_out, interface), version, find)


check_version(CALLED)
