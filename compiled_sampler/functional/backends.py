"""How the functions run their stages; compiled stages are shared by all calls of the process."""

from __future__ import annotations

import functools

from compiled_sampler.core.stage import Run, call
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.scalars import check_choice

BACKENDS = ("auto", "compiled", "eager")


def run_of(backend: str) -> Run:
    """What runs the stages of a call.

    Args:
        backend: one of ``BACKENDS``; "auto" compiles.

    Raises:
        ValueError: another name.
    """
    check_choice("backend", backend, BACKENDS, "to replay a graph, capture the call in your own")
    return call if backend == "eager" else _shared_stages()


@functools.cache
def _shared_stages() -> CompiledStages:
    return CompiledStages()
