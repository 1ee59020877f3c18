"""Code for a GPU on a machine without one."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from torch import Tensor
from torch._inductor import config
from torch._inductor.codegen.triton import TritonKernel

from compiled_sampler.lowering import compiled_stages as lowering
from compiled_sampler.passes import blocks, maxima, narrowing
from compiled_sampler.pipeline import candidates as ordering
from compiled_sampler.pipeline import sample as drawing
from compiled_sampler.pipeline import verify as pipeline
from compiled_sampler.speculation import residual


def _yes(x: Tensor) -> bool:
    return True  # a function, because Dynamo cannot trace a mock


@contextmanager
def for_a_gpu() -> Iterator[None]:
    """Stages take their GPU's ways on the CPU, and Inductor does not ask a GPU whether kernels may start early."""
    with ExitStack() as stack:
        for module in (blocks, maxima, narrowing, ordering, drawing, residual, pipeline, lowering):
            stack.enter_context(mock.patch.object(module, "is_on_gpu", _yes))
        overlaps = staticmethod(lambda: config.triton.enable_pdl)
        stack.enter_context(mock.patch.object(TritonKernel, "_enable_pdl_codegen", overlaps))
        yield
