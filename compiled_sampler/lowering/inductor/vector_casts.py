"""How Inductor casts the bits of a vector in C++: here as a whole.

Left alone, it casts lane by lane, through memory. Of a vector of 64 bytes g++ then stores two halves, and the load of
the whole waits until both have left for the cache: a race over rows, a dozen casts a token, takes 3.4 times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor.codegen.cpp import CppVecOverrides
from torch._inductor.virtualized import V

_CAST = "to_dtype_bitcast"
_SMALLEST = 4  # bytes of a lane; narrower ones may be held as something wider


@contextmanager
def whole_casts() -> Iterator[None]:
    """Within, Inductor's C++ reads the bits of a vector as another type without a look at its lanes."""
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
