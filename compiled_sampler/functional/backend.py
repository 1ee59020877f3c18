"""What runs the stages of all calls of the functions: eager torch, or stages that are compiled once for the process."""

from __future__ import annotations

import functools

from compiled_sampler.core.stage import Run
from compiled_sampler.engine.boundary.arguments import check_progress
from compiled_sampler.lowering.compiled_stages import CompiledStages, Progress
from compiled_sampler.pipeline.chunks import eagerly
from compiled_sampler.scalars import check_choice

BACKENDS = ("auto", "compiled", "eager")


def run_of(backend: str) -> Run:
    """What runs the stages of a call."""
    check_choice("backend", backend, BACKENDS, "to replay a graph, capture the call in your own")
    return eagerly if backend == "eager" else _shared_stages()


def warmup(progress: Progress | None = None) -> None:
    """Compile the stages of all calls that were made before, and wait for them.

    Until then, and until background processes have compiled them, calls run in eager torch with the same bits. A call
    can be captured in a CUDA graph after it was made, after ``warmup()``, and made once more.

    Args:
        progress: called as ``progress(done, total, label)`` for each stage that is ready.
    """
    check_progress(progress)
    _shared_stages().compile_all(progress)


@functools.cache
def _shared_stages() -> CompiledStages:
    return CompiledStages()
