"""Modules of TokenSpeed for tests of its adapter: from its published source, or stand-ins of what is used."""

import dataclasses
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.integrations.tokenspeed.versions import INTERFACE
from tests.engines.published_engine import isolated, published, put_module

KINDS = ("stand-in", "published")
TOP_K_DISABLED = 1 << 30
_SAMPLING = "tokenspeed.runtime.sampling"
_ADAPTER = "compiled_sampler.integrations.tokenspeed"
_REAL_SAMPLING = ("backends.base", "registry", "sampling_batch_info", "sampling_params", "utils")
REAL = (
    *(f"{_SAMPLING}.{name}" for name in _REAL_SAMPLING),
    "tokenspeed.runtime.execution.output_layout",
    "tokenspeed.runtime.execution.model_executor",
    "tokenspeed.runtime.execution.input_buffer",
)


@contextmanager
def engine(kind: str) -> Iterator[None]:
    """The modules of TokenSpeed within the block."""
    if kind == "stand-in":
        with isolated(("tokenspeed",), _ADAPTER):
            for name, contents in stand_ins().items():
                put_module(name, contents)
            yield
    else:
        with published("tokenspeed", REAL, ("tokenspeed_kernel", "msgspec")):
            importlib.import_module("msgspec").Struct = Struct  # type: ignore[attr-defined]
            tracing: Any = importlib.import_module("tokenspeed.runtime.utils.nvtx")
            tracing.nvtx_range = lambda *_, **__: lambda function: function
            yield


class Struct:
    """What msgspec's Struct does for a record: fields by keyword, defaults of the class, then ``__post_init__``."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Take the options of msgspec, and list the fields."""
        cls.__struct_fields__ = tuple(vars(cls).get("__annotations__", {}))  # type: ignore[attr-defined]

    def __init__(self, **given: Any) -> None:
        """Set the fields that are given; others are attributes of the class."""
        vars(self).update(given)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Nothing, unless the record says otherwise."""


class _Backend:
    """What the adapter calls of SamplingBackend, for one rank."""

    _HAS_POOL_STATE = False

    def __init__(self, config: Any) -> None:
        self.config = config
        self._last_rid_per_slot: list[str | None] = [None] * (config.max_req_pool_size + 1)
        places = config.max_bs * config.max_draft_tokens_per_req
        self._predict_buf = torch.zeros(places, dtype=torch.int32, device=config.device)
        self._accept_length_buf = torch.zeros(config.max_bs, dtype=torch.int32, device=config.device)
        self._accept_index_buf = torch.zeros(places, dtype=torch.int32, device=config.device)

    def prepare_step(
        self,
        request_ids: list[str],
        request_pool_indices: list[int],
        sampling_params_list: list[Any],
        num_tokens_per_req: int = 1,
    ) -> None:
        for request_id, index, params in zip(request_ids, request_pool_indices, sampling_params_list, strict=True):
            if self._last_rid_per_slot[index] != request_id:
                self._reset_slot(index, params)  # type: ignore[attr-defined]
                self._last_rid_per_slot[index] = request_id
        self._prepare_step_hook(  # type: ignore[attr-defined]
            num_tokens_per_req=num_tokens_per_req, bs=len(request_ids), request_pool_indices=request_pool_indices
        )

    def _offsets_pool_for_kernels(self, sampling_info: Any) -> Any:
        return sampling_info.valid_cache_lengths

    def accepted_path(self, bs: int, num_nodes: int) -> Tensor:
        return self._accept_index_buf[: bs * num_nodes].view(bs, num_nodes)

    def maybe_broadcast(self, *tensors: Tensor) -> None:
        pass

    def broadcast_verify_outputs(self) -> None:
        pass


def _logprobs(logits: Tensor, tokens: Tensor, *, logprob_order: str) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]


def stand_ins() -> dict[str, dict[str, Any]]:
    """What the modules of TokenSpeed hold that the adapter names; the contract's test holds the names to it."""

    def record(name: str, **defaults: Any) -> type:
        fields = INTERFACE.fields[f"{_SAMPLING}.{name}"]
        return dataclasses.make_dataclass(
            name.partition(":")[2], [(each, Any, dataclasses.field(default=defaults.get(each))) for each in fields]
        )

    return {
        f"{_SAMPLING}.backends.base": {
            "SamplingBackend": _Backend,
            "SamplingBackendConfig": record("backends.base:SamplingBackendConfig"),
            "CUDA_GRAPH_VARIANT_DEFAULT": "default",
        },
        f"{_SAMPLING}.sampling_batch_info": {
            "SamplingBatchInfo": record("sampling_batch_info:SamplingBatchInfo", batch_row_offset=0)
        },
        f"{_SAMPLING}.utils": {"gather_token_logprobs": _logprobs, "nan_guard_logits": lambda logits, enabled: logits},
    }


def named(name: str) -> Any:
    """What ``module:name`` below TokenSpeed's sampling package stands for in the modules that are there."""
    module, _, path = name.partition(":")
    return getattr(importlib.import_module(f"{_SAMPLING}.{module}"), path)


def params_of(**given: Any) -> Any:
    """TokenSpeed's SamplingParams as its engine holds them: no filter and no seed of None."""
    neutral = {"temperature": 1.0, "top_k": TOP_K_DISABLED, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    return SimpleNamespace(**{**neutral, **given})


def config_of(vocab_size: int, **changed: Any) -> Any:
    """TokenSpeed's SamplingBackendConfig."""
    kind = named("backends.base:SamplingBackendConfig")
    sizes = {"max_bs": 8, "max_draft_tokens_per_req": 4, "max_req_pool_size": 15, "vocab_size": vocab_size}
    fields = {"enable_speculative_sampling": False, "logprob_order": "torch", "device": "cpu", **sizes, **changed}
    if "sampling_stream" in {each.name for each in dataclasses.fields(kind)}:
        fields["sampling_stream"] = "per-request"
    return kind(**fields)
