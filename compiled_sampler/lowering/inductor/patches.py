"""Patches of Inductor as contexts, behind the guard and under the lock; on an unknown torch they do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from compiled_sampler.lowering.inductor.versions import LOCK, is_known
from compiled_sampler.lowering.stages.stage_tuning import StageTuning


@contextmanager
def tuned_kernels(tuning: StageTuning, rows: int, block: int = 0, *, on_gpu: bool) -> Iterator[None]:
    """Within, Inductor makes the Triton kernels of a stage as it declares, and C++ with whole casts.

    Args:
        tuning: of the stage.
        rows: that the kernels are made for, see ``StageTuning.rows_hint``.
        block: tokens a block, of a pass over the row.
        on_gpu: whether they are Triton kernels.
    """
    if not is_known():
        yield
        return
    with LOCK, ExitStack() as patches:
        for patch in _triton_patches(tuning, rows, block) if on_gpu else _cpp_patches():
            patches.enter_context(patch)
        yield


@contextmanager
def one_wait() -> Iterator[None]:
    """Within, kernels that this thread compiles are not waited for; at the end they are ready to run.

    Raises:
        Exception: the first of the compilers' errors.
    """
    if not is_known():
        yield
        return
    from compiled_sampler.lowering.inductor import waiting

    with LOCK, waiting.one_wait():
        yield


def _triton_patches(tuning: StageTuning, rows: int, block: int) -> Iterator[AbstractContextManager[object]]:
    from compiled_sampler.lowering.inductor.kernel_classes import fixed, rewritten

    tile = tuning.tile_for(rows, block)
    if tile is not None:
        yield fixed(tile)
    if tuning.streams or tuning.launches_next_promptly or (tile is not None and tile.least == 1):
        yield rewritten(streams=tuning.streams, prompts=tuning.launches_next_promptly)


def _cpp_patches() -> Iterator[AbstractContextManager[object]]:
    from compiled_sampler.lowering.inductor.vector_casts import whole_casts

    yield whole_casts()
