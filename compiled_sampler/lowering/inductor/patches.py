"""Patches of Inductor as contexts, behind the guard and under the lock; on an unknown torch they do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from compiled_sampler.exact.triton import LOCK
from compiled_sampler.lowering.inductor.versions import is_known
from compiled_sampler.lowering.tuning import StageTuning

_CAST = "to_dtype_bitcast"
_SMALLEST = 4  # bytes of a lane; narrower ones may be held as something wider


@contextmanager
def tuned_kernels(tuning: StageTuning, rows: int, block: int = 0, *, on_gpu: bool) -> Iterator[None]:
    """Within, Inductor makes the Triton kernels of a stage as it declares, and C++ with whole casts."""
    if not is_known():
        yield
        return
    with LOCK, ExitStack() as patches:
        for patch in _triton_patches(tuning, rows, block) if on_gpu else [whole_casts()]:
            patches.enter_context(patch)
        yield


def _triton_patches(tuning: StageTuning, rows: int, block: int) -> Iterator[AbstractContextManager[object]]:
    from compiled_sampler.lowering.inductor.triton_kernels import fixed, rewritten

    tile = tuning.tile_for(rows, block)
    if tile is not None:
        yield fixed(tile)
    ahead = rows <= tuning.ahead_rows
    how = {"streams": tuning.streams, "prompts": tuning.launches_next_promptly, "looks_ahead": ahead}
    if any(how.values()) or (tile is not None and tile.least == 1):
        yield rewritten(**how)


@contextmanager
def whole_casts() -> Iterator[None]:
    """Within, Inductor's C++ reads the bits of a vector as another type without a look at its lanes."""
    # Left alone, it casts lane by lane, through memory. Of a vector of 64 bytes g++ then stores two halves, and the
    # load of the whole waits until both have left for the cache: a race over rows, a dozen casts a token, takes 3.4
    # times as long.
    from torch._inductor.codegen.cpp import CppVecOverrides
    from torch._inductor.virtualized import V

    usual = vars(CppVecOverrides)[_CAST]

    def cast(x: Any, dtype: torch.dtype, src_dtype: torch.dtype) -> Any:
        if min(dtype.itemsize, src_dtype.itemsize) < _SMALLEST:
            return usual.__func__(x, dtype, src_dtype)
        return f"{V.kernel._get_vec_type(dtype)}::loadu(&{x})"

    cast.__name__ = _CAST  # by which Inductor finds the same of scalars
    setattr(CppVecOverrides, _CAST, staticmethod(cast))
    try:
        yield
    finally:
        setattr(CppVecOverrides, _CAST, usual)
