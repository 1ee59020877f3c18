"""Puts our classes where continuous batching of transformers makes its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from transformers.generation.continuous_batching import continuous_api

from compiled_sampler.integrations.transformers import versions
from compiled_sampler.integrations.transformers.continuous_batching.processors import SeededProcessors
from compiled_sampler.integrations.transformers.continuous_batching.runner import SeededRunner

_NAMES = ("ModelRunner", "ContinuousBatchingLogitsProcessorList")
_THEIRS: dict[str, Any] = {name: getattr(continuous_api, name, None) for name in _NAMES}


def install(backend: str = "auto") -> None:
    """Have every manager that is made from now on draw its tokens here; calling it twice is no harm.

    ``add_request`` and ``add_requests`` then take ``seed``, and with ``per_request_processors`` of the config also
    ``temperature``, ``top_k``, ``top_p`` and ``min_p``.

    Args:
        backend: of ``compiled_sampler.functional.sample``.

    Raises:
        ImportError: a version of transformers that lacks what is replaced.
        ValueError: an unknown backend.
    """
    if backend not in ("auto", "compiled", "eager"):
        raise ValueError(f"backend must be auto, compiled or eager, got {backend!r}")
    versions.check_batching(transformers.__version__, _THEIRS)
    continuous_api.ModelRunner = functools.partial(SeededRunner, backend=backend)
    continuous_api.ContinuousBatchingLogitsProcessorList = SeededProcessors


def uninstall() -> None:
    """Put the classes of transformers back; managers that were made before stay what they are."""
    for name, theirs in _THEIRS.items():
        setattr(continuous_api, name, theirs)


@contextmanager
def installed(backend: str = "auto") -> Iterator[None]:
    """``install`` for a block. A manager that is to draw here is made and started inside.

    What was there before stands there again behind the block, also an ``install`` with another backend.
    """
    before = {name: getattr(continuous_api, name) for name in _NAMES}
    install(backend)
    try:
        yield
    finally:
        for name, each in before.items():
            setattr(continuous_api, name, each)
