"""Switching the adapter on: the names under which SGLang finds the backend, and the seeds that it then brings."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import torch

from compiled_sampler.functional.functions import BACKENDS
from compiled_sampler.integrations.engine_interface import Interface, Supported, ends_process, seed_of
from compiled_sampler.scalars import as_int64

VARIABLE = "COMPILED_SAMPLER_SGLANG"
"""Environment variable that switches the plugin on: ``1``, or a backend of ``compiled_sampler.functional``."""
NAME = "compiled_sampler"  # of the backend: ``--sampling-backend compiled_sampler``
DETERMINISTIC = "pytorch"
"""The backend that ``--enable-deterministic-inference`` puts in place of any other; it is taken too."""
_BATCHES = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_BACKEND: list[str] = []  # the backend of ``functional``, once the adapter is on in this process


def load() -> None:
    """What SGLang calls in each of its processes: ``install`` as the environment variable says, if it is set."""
    # SGLang would log an exception of a plugin and go on, with its own sampler.
    with ends_process(VARIABLE):
        backend = from_text(os.environ.get(VARIABLE, ""))
        if backend is not None:
            _install(backend)


def install(*, backend: str = "auto") -> None:
    """Have SGLang offer the sampler as a backend, here and in processes that it starts, which read the variable.

    Args:
        backend: of ``compiled_sampler.functional``.

    Raises:
        ImportError: a SGLang that the adapter does not fit.
        ValueError: an unknown backend.
    """
    known = from_text(backend)
    if known is None:
        raise ValueError("backend must be named, got nothing; 'auto' compiles")
    _install(known)
    os.environ[VARIABLE] = known


def _install(backend: str) -> None:
    """Register the backend under both names, and once the hooks that bring seeds and the bound of top_k."""
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not _BACKEND:
        check_version(version("sglang"))
        for name in (NAME, DETERMINISTIC):
            register_sampler_backend(name, _made)
        hooks = {"from_schedule_batch": completed, "merge_batch": merged, "copy_for_forward": copied}
        for name, hook in hooks.items():
            HookRegistry.register(f"{_BATCHES}.{name}", hook, HookType.AFTER)
    _BACKEND[:] = [backend]


def _made() -> Any:
    from compiled_sampler.integrations.sglang.drawing import CompiledSampler

    return CompiledSampler(_BACKEND[0])


def completed(info: Any, _: Any, batch: Any, vocab_size: int) -> None:
    """Set the bound of top_k, and the seeds of a batch that SGLang gave none, as it does unless it is deterministic."""
    from sglang.srt.runtime_context import get_device, get_exec

    top_ks = [each.sampling_params.top_k for each in batch.reqs]
    info.max_top_k = max(top_ks, default=0)
    if info.sampling_seed is None and get_exec().kernel.sampling_backend in (NAME, DETERMINISTIC):
        salt = get_device().random_seed
        seeds = [request_seed(each, salt) for each in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.temperatures.device, non_blocking=True)


def merged(_: None, info: Any, other: Any) -> None:
    """Set the bound of top_k of a batch that has taken in another; a batch that was filtered keeps its own."""
    info.max_top_k = max(info.max_top_k, other.max_top_k)


def copied(copy: Any, info: Any) -> None:
    """Give the bound of top_k to the copy that a step draws from."""
    copy.max_top_k = info.max_top_k


def request_seed(request: Any, salt: int) -> int:
    """The seed of a request, in [-2**63, 2**63): its own, or of its id."""
    given = request.sampling_params.sampling_seed
    return as_int64(int(given) if given is not None else seed_of(request.rid, salt))


def from_text(text: str) -> str | None:
    """The backend that an environment variable names; None for ``0`` and for nothing."""
    if text in ("", "0"):
        return None
    if text == "1":
        return "auto"
    if text not in BACKENDS:
        raise ValueError(f"{VARIABLE} must be 1 or one of {BACKENDS}, got {text!r}; 0 switches it off")
    return text


OLDEST, NEWEST = "0.5.17", "0.5.17"
"""The versions that the adapter was run in; another one is refused where it differs in what is called."""

_SAMPLER = "sglang.srt.layers.sampler:Sampler"
_BATCH_INFO = "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo"
# fmt: off
INTERFACE = Interface(
    parameters={
        f"{_SAMPLER}.forward": (
            "self", "logits_output", "sampling_info", "return_logprob", "top_logprobs_nums", "token_ids_logprobs",
            "positions",
        ),
        f"{_SAMPLER}._preprocess_logits": ("self", "logits", "sampling_info"),
        f"{_SAMPLER}._sync_token_ids_across_tp": ("self", "batch_next_token_ids", "sampling_info"),
        f"{_SAMPLER}._attach_sampling_mask_to_output": (
            "self", "logits_output", "sampling_info", "batch_next_token_ids", "sampling_mask_data",
        ),
        "sglang.srt.layers.sampler:register_sampler_backend": ("backend", "factory"),
        "sglang.srt.layers.logprob_processor:OutputLogprobProcessor.compute_logprobs": (
            "self", "logprobs", "top_logprobs_nums", "token_ids_logprobs", "batch_next_token_ids",
        ),
        "sglang.srt.plugins.hook_registry:HookRegistry.register": ("target", "hook", "hook_type", "source"),
        f"{_BATCH_INFO}.from_schedule_batch": ("batch", "vocab_size"),
        f"{_BATCH_INFO}.merge_batch": ("self", "other"),
        f"{_BATCH_INFO}.copy_for_forward": ("self",),
    },
    fields={
        "sglang.srt.layers.logits_processor:LogitsProcessorOutput": (
            "next_token_logits", "next_token_sampling_mask_idx",
        ),
        _BATCH_INFO: (
            "temperatures", "top_ks", "top_ps", "min_ps", "sampling_seed", "is_all_greedy", "need_top_k_sampling",
            "need_top_p_sampling", "need_min_p_sampling", "return_sampling_masks",
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
check_version = Supported("SGLang", OLDEST, f"install a version from {OLDEST} to {NEWEST}", INTERFACE).check
