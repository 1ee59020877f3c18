"""Switching the adapter on: the names under which TokenSpeed finds the backend, and what is wrapped around it."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

from compiled_sampler.integrations.engine_interface import ends_process, wrapped
from compiled_sampler.integrations.tokenspeed.pools import unsupported
from compiled_sampler.integrations.tokenspeed.settings import VARIABLE, Settings, from_text
from compiled_sampler.integrations.tokenspeed.versions import EXECUTOR, PARAMS, check_version

NAME = "compiled_sampler"
"""Of the backend, for callers in Python: ``ServerArgs(sampling_backend="compiled_sampler")``."""
_WRAPPED: list[tuple[Any, str, Any]] = []
"""What is wrapped in this process, and what it was."""


def load() -> None:
    """What TokenSpeed calls in each of its processes: ``install`` as the environment variable says, if it is set."""
    # TokenSpeed would warn of an exception of a plugin and go on, with its own backend.
    with ends_process(VARIABLE):
        settings = from_text(os.environ.get(VARIABLE, ""))
        if settings is not None:
            _install(settings)


def install(*, instead_of: str | None = None, backend: str = "auto") -> None:
    """Have TokenSpeed offer the sampler as a backend, here and in processes that it starts, which read the variable.

    Args:
        instead_of: a name of its command line that shall stand for this library, as that takes no other.
        backend: of ``compiled_sampler.functional``.

    Raises:
        ImportError: a TokenSpeed that the adapter does not fit.
        ValueError: an unknown name.
    """
    settings = Settings(instead_of, backend)
    _install(settings)
    os.environ[VARIABLE] = settings.text


def _install(settings: Settings) -> None:
    """Register the backend, and once wrap what tells it lengths and what refuses requests."""
    from tokenspeed.runtime.sampling.registry import register_backend

    if not _WRAPPED:
        check_version(version("tokenspeed"))
        _WRAPPED.append(wrapped(f"{EXECUTOR}.__init__", _with_lengths))
        _WRAPPED.append(wrapped(f"{PARAMS}.verify", _with_refusals))
    from compiled_sampler.integrations.tokenspeed.drawing import CompiledSamplingBackend

    made = type("CompiledSamplingBackend", (CompiledSamplingBackend,), {"backend": settings.backend})
    register_backend(NAME, made)
    if settings.instead_of is not None:
        # TokenSpeed imports the module before it looks for the name, and so would register its own behind this.
        import_module(f"tokenspeed.runtime.sampling.backends.{settings.instead_of}")
        register_backend(settings.instead_of, made)


def _with_lengths(original: Callable[..., Any]) -> Callable[..., Any]:
    """``__init__`` of an executor, which then tells the backend where lengths stand."""

    def init(self: Any, *args: Any, **given: Any) -> None:
        original(self, *args, **given)
        if hasattr(self.sampling_backend, "bind_lengths"):
            self.sampling_backend.bind_lengths(self.input_buffers.seq_lens_buf)

    return init


def _with_refusals(original: Callable[..., Any]) -> Callable[..., Any]:
    """``verify`` of TokenSpeed's SamplingParams, which refuses a request before an engine has it."""

    def verify(self: Any, vocab_size: int) -> None:
        original(self, vocab_size)
        reason = unsupported(self.requested_features())
        if reason is not None:
            raise ValueError(reason)

    return verify
