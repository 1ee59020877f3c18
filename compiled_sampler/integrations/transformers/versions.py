"""Which versions of transformers the loops fit: by number, and by what they call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import transformers

OLDEST, NEWEST = "5.17", "5.24"
"""The versions that the tests passed with; a newer one is taken while it has what is called."""

CALLED: dict[str, tuple[str, ...]] = {
    "_prefill": ("input_ids", "generation_config", "model_kwargs", "is_first_iteration"),
    "prepare_inputs_for_generation": ("input_ids", "next_sequence_length"),
    "_update_model_kwargs_for_generation": ("outputs", "model_kwargs", "is_encoder_decoder", "num_new_tokens"),
    "_has_unfinished_sequences": ("this_peer_finished", "synced_gpus", "device"),
    "_optimize_model_for_decode": (),
    "_valid_auto_compile_criteria": ("model_kwargs", "generation_config"),
}
"""Methods of GenerationMixin that the loops call, with the parameters that they pass."""

REPLACED: dict[str, dict[str, tuple[str, ...]]] = {
    "ModelRunner": {
        "__init__": ("logit_processor", "cb_config", "inputs_and_outputs", "cache", "do_sample", "return_logprobs"),
        "_forward_process_and_sample": ("model", "batch_data", "carry_over_ids", "prev_output_ids", "output_ids"),
        "_sample": ("scores", "output_ids"),
    },
    "ContinuousBatchingLogitsProcessorList": {
        "__init__": ("logits_processor", "per_request_processors", "drop_unsupported_processors"),
        "check_kwargs": ("kwargs",),
        "fill_defaults": ("int32_tensor",),
        "prepare_tensor_args": ("requests_in_batch", "arg_storage"),
    },
}
"""Classes of continuous batching that ours stand for, with the methods and parameters that both must have."""

_WAY_OUT = f"pip install 'transformers>={OLDEST},<={NEWEST}'"


def check_version(version: str, mixin: Any) -> None:
    """Raise ImportError unless the loops fit a version of transformers."""
    if _numbers(version) < _numbers(OLDEST):
        raise ImportError(f"transformers must be {OLDEST} or newer, got {version}; {_WAY_OUT}")
    for name, passed in CALLED.items():
        method = getattr(mixin, name, None)
        if method is None or set(passed) - set(inspect.signature(method).parameters):
            raise ImportError(
                f"transformers must have GenerationMixin.{name}({', '.join(passed)}), got {version}, where it differs; "
                f"{_WAY_OUT}"
            )


def check_batching(version: str, classes: Mapping[str, Any]) -> None:
    """Raise ImportError unless our runner and processors can stand for those of a version."""
    for name, methods in REPLACED.items():
        for method, passed in methods.items():
            found = getattr(classes.get(name), method, None)
            if found is None or set(passed) - set(inspect.signature(found).parameters):
                raise ImportError(
                    f"continuous batching must have {name}.{method}({', '.join(passed)}), got {version}, where it "
                    f"differs; {_WAY_OUT}"
                )


def _numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


check_version(transformers.__version__, transformers.GenerationMixin)
