"""Modules of SGLang for tests of its adapter: from its published source, or stand-ins with the names that are used."""

import dataclasses
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.integrations.sglang.plugin import INTERFACE
from tests.engines.published_engine import isolated, published, put_module

TOP_K_ALL = 1 << 30
KINDS = ("stand-in", "published")
_BATCH_INFO = "sglang.srt.sampling.sampling_batch_info"
_LAYERS = ("sampler", "logits_processor", "logprob_processor")
REAL = (_BATCH_INFO, "sglang.srt.plugins.hook_registry", *(f"sglang.srt.layers.{name}" for name in _LAYERS))
_ADAPTER = "compiled_sampler.integrations.sglang"


@contextmanager
def engine(kind: str) -> Iterator[SimpleNamespace]:
    """The modules of SGLang within the block; gives its configuration, which a test may change."""
    config = configuration()
    if kind == "stand-in":
        with isolated(("sglang",), _ADAPTER):
            for name, contents in stand_ins(config).items():
                put_module(name, contents)
            yield config
    else:
        with published("sglang", REAL):
            configure(config)
            yield config


def configuration() -> SimpleNamespace:
    """What ``runtime_context`` answers with, as far as it is asked."""
    features = {"sampling_mask_max_tokens": 64, "enable_custom_logit_processor": False, "enable_watermark": False}
    kinds = {
        "deterministic": SimpleNamespace(rl_on_policy_target=None, enable_deterministic_inference=False),
        "kernel": SimpleNamespace(sampling_backend="compiled_sampler"),
        "features": SimpleNamespace(**features),
    }
    return SimpleNamespace(
        spec=SimpleNamespace(speculative_algorithm=None),
        device=SimpleNamespace(random_seed=7),
        exec=SimpleNamespace(**kinds),
    )


def configure(config: SimpleNamespace) -> None:
    """Give the mocked modules what the real ones look at."""
    given: dict[str, dict[str, Any]] = {
        "runtime_context": context_of(config),
        "sampling.sampling_params": {"TOP_K_ALL": TOP_K_ALL},
        "utils.common": {"get_bool_env_var": lambda *_: False},
        "managers.schedule_batch": {"ScheduleBatch": type("ScheduleBatch", (), {})},
        "server_args": {"SAMPLING_BACKEND_CHOICES": {"flashinfer", "pytorch", "ascend"}},
    }
    for name, contents in given.items():
        vars(importlib.import_module(f"sglang.srt.{name}")).update(contents)


def context_of(config: SimpleNamespace) -> dict[str, Any]:
    """The functions of ``runtime_context``."""
    return {"get_exec": lambda: config.exec, "get_spec": lambda: config.spec, "get_device": lambda: config.device}


def compute_logprobs(logprobs: Tensor, top_nums: Any, token_ids: Any, batch_next_token_ids: Tensor) -> SimpleNamespace:
    """As SGLang's processor of logprobs."""
    found = logprobs[torch.arange(len(logprobs)), batch_next_token_ids]
    return SimpleNamespace(write_output_to=lambda outputs: setattr(outputs, "next_token_logprobs", found))


def stand_ins(config: SimpleNamespace) -> dict[str, dict[str, Any]]:
    """What the modules of SGLang hold that the adapter names; the contract's test holds the names to SGLang's."""

    class Sampler(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output_logprob_processor = SimpleNamespace(compute_logprobs=compute_logprobs)
            self.rl_on_policy_target = config.exec.deterministic.rl_on_policy_target

        def _preprocess_logits(self, logits: Tensor, sampling_info: Any) -> Tensor:
            return logits

        def _sync_token_ids_across_tp(self, batch_next_token_ids: Tensor, sampling_info: Any) -> None:
            pass

        def _attach_sampling_mask_to_output(
            self, logits_output: Any, sampling_info: Any, batch_next_token_ids: Tensor, sampling_mask_data: Any
        ) -> None:
            ids, _, is_kept, _ = sampling_mask_data
            asked = zip(sampling_info.return_sampling_masks, ids, is_kept, strict=True)
            logits_output.next_token_sampling_mask_idx = [
                row[mask].tolist() if is_asked else None for is_asked, row, mask in asked
            ]

    def fields(name: str) -> list[tuple[str, Any, Any]]:
        return [(each, Any, dataclasses.field(default=None)) for each in INTERFACE.fields[name]]

    outputs, info = "sglang.srt.layers.logits_processor:LogitsProcessorOutput", f"{_BATCH_INFO}:SamplingBatchInfo"
    made = [(each, Any, None) for each in ("vocab_size", "next_token_logprobs")]
    return {
        "sglang.srt.layers.sampler": {"Sampler": Sampler, "SGLANG_RETURN_ORIGINAL_LOGPROB": False},
        "sglang.srt.layers.logits_processor": {
            "LogitsProcessorOutput": dataclasses.make_dataclass("LogitsProcessorOutput", [*fields(outputs), made[1]])
        },
        _BATCH_INFO: {"SamplingBatchInfo": dataclasses.make_dataclass("SamplingBatchInfo", [*fields(info), made[0]])},
        "sglang.srt.runtime_context": context_of(config),
    }


def named(name: str) -> Any:
    """What ``module:name`` stands for in the modules that are there."""
    module, _, path = name.partition(":")
    return getattr(importlib.import_module(module), path)


LAWS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.3},
    {"top_k": 1},
    {"top_p": 0.6, "temperature": 1.5},
    {"min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 40, "temperature": 2.0},
]
"""Parameters of requests."""


def batch_info(laws: list[dict[str, Any]], seeds: list[int] | None, **changed: Any) -> Any:
    """SGLang's SamplingBatchInfo for requests, with the flags that it derives."""
    full = [{"temperature": 1.0, "top_k": TOP_K_ALL, "top_p": 1.0, "min_p": 0.0, **law} for law in laws]
    most = max(law["top_k"] for law in full)

    def column(name: str) -> list[Any]:
        return [law[name] for law in full]

    fields = {
        "temperatures": torch.tensor(column("temperature"), dtype=torch.float).view(-1, 1),
        "top_ks": torch.tensor(column("top_k"), dtype=torch.int32),
        "top_ps": torch.tensor(column("top_p"), dtype=torch.float),
        "min_ps": torch.tensor(column("min_p"), dtype=torch.float),
        "sampling_seed": None if seeds is None else torch.tensor(seeds, dtype=torch.int64),
        "is_all_greedy": most <= 1,
        "need_top_k_sampling": any(law["top_k"] != TOP_K_ALL for law in full),
        "need_top_p_sampling": any(law["top_p"] != 1.0 for law in full),
        "need_min_p_sampling": any(law["min_p"] > 0 for law in full),
        "vocab_size": 64,
    }
    kind = named(f"{_BATCH_INFO}:SamplingBatchInfo")
    if "is_any_greedy" in {each.name for each in dataclasses.fields(kind)}:
        fields["is_any_greedy"] = any(law["top_k"] <= 1 for law in full)
    info = kind(**fields, **changed)
    info.max_top_k = most  # as the plugin's hook sets it
    return info


def outputs_of(logits: Tensor) -> Any:
    """SGLang's LogitsProcessorOutput."""
    return named("sglang.srt.layers.logits_processor:LogitsProcessorOutput")(next_token_logits=logits)
