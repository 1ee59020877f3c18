"""Code for a GPU on a machine without one."""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch._inductor import config
from torch._inductor.codegen.triton import TritonKernel

from compiled_sampler.lowering.compiling import stage_code
from compiled_sampler.lowering.stages import tuning
from compiled_sampler.modes import Mode
from compiled_sampler.pipeline import schedule
from compiled_sampler.pipeline.schedule import Schedule, schedule_for


@contextmanager
def for_a_gpu() -> Iterator[None]:
    """Steps follow a GPU's schedule on the CPU, and Inductor does not ask a GPU whether kernels may start early."""
    with ExitStack() as stack:
        for module in (schedule, stage_code, tuning):
            stack.enter_context(mock.patch.object(module, "is_gpu", return_value=True))
        overlaps = staticmethod(lambda: config.triton.enable_pdl)
        stack.enter_context(mock.patch.object(TritonKernel, "_enable_pdl_codegen", overlaps))
        yield


def tiles(code: str) -> list[tuple[str, str]]:
    """XBLOCK and warps of each kernel of generated code; none where Inductor would time several tilings."""
    return re.findall(r"config=\{'XBLOCK': (\d+), 'num_warps': (\d+)", code)


def gpu_schedule(mode: Mode, rows: int) -> Schedule:
    """The schedule that a GPU follows for so many rows."""
    with for_a_gpu():
        return schedule_for(mode, rows, torch.device("cpu"))


def schedule_by_bounds(mode: Mode, rows: int, block: int) -> Schedule:
    """A GPU's schedule that races by bounds in blocks of so many tokens, however few the rows and logits are."""
    made = gpu_schedule(mode, rows)
    return dataclasses.replace(made, races_by_bounds=True, race=made.race._replace(block=block, slices=1))
