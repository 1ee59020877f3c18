"""Schedules and tilings of a GPU on a machine without one."""

import dataclasses
import re

import torch

from compiled_sampler.modes import Mode
from compiled_sampler.pipeline.schedule import Schedule, schedule_for
from tools.kernels.launches import for_a_gpu


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
