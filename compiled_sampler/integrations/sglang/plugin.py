"""Switching the adapter on: the names under which SGLang finds the backend, and the seeds that it then brings."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import torch

from compiled_sampler.integrations.engine_interface import ends_process
from compiled_sampler.integrations.request_seeds import seed_of
from compiled_sampler.integrations.sglang.settings import VARIABLE, from_text
from compiled_sampler.integrations.sglang.versions import check_version
from compiled_sampler.scalars import as_int64

NAME = "compiled_sampler"
"""Of the backend: ``--sampling-backend compiled_sampler``."""
DETERMINISTIC = "pytorch"
"""The backend that ``--enable-deterministic-inference`` puts in place of any other; it is taken too."""
_SEEDED = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
_BACKEND: list[str] = []
"""The backend of ``functional``, once the adapter is on in this process."""


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
    """Register the backend under both names, and once the hook that brings seeds."""
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not _BACKEND:
        check_version(version("sglang"))
        for name in (NAME, DETERMINISTIC):
            register_sampler_backend(name, _made)
        HookRegistry.register(_SEEDED, with_seeds, HookType.AFTER)
    _BACKEND[:] = [backend]


def _made() -> Any:
    from compiled_sampler.integrations.sglang.drawing import CompiledSampler

    return CompiledSampler(_BACKEND[0])


def with_seeds(info: Any, _: Any, batch: Any, vocab_size: int) -> None:
    """Set the seeds of a batch that SGLang gave none, as it does unless its mode is deterministic."""
    from sglang.srt.runtime_context import get_device, get_exec

    if info.sampling_seed is None and get_exec().kernel.sampling_backend in (NAME, DETERMINISTIC):
        salt = get_device().random_seed
        seeds = [request_seed(each, salt) for each in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.temperatures.device, non_blocking=True)


def request_seed(request: Any, salt: int) -> int:
    """The seed of a request, in [-2**63, 2**63): its own, or of its id."""
    given = request.sampling_params.sampling_seed
    return int(given) if given is not None else as_int64(seed_of(request.rid, salt))
