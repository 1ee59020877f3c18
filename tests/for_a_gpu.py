"""Schedules, code and tilings of a GPU on a machine without one."""

import dataclasses
import re
from typing import Any

import torch

from compiled_sampler.core.rows import RowSlots
from compiled_sampler.modes import Mode
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline.schedule import Schedule, schedule_for
from tests.builders.inputs import slot_table
from tools.kernels.launches import for_a_gpu, generated


def tiles(code: str) -> list[tuple[str, str]]:
    """XBLOCK and warps of each kernel of generated code; none where Inductor would time several tilings."""
    return re.findall(r"config=\{'XBLOCK': (\d+), 'num_warps': (\d+)", code)


def gpu_code(stage: Any, *tensors: Any, **static: Any) -> str:
    """The Triton code that Inductor generates for a stage on a GPU."""
    with for_a_gpu():
        (found,) = generated(lambda run: run(stage, *tensors, **static), "triton")
    assert found.code is not None
    return found.code


def rows_of_one_request(rows: int, vocab_size: int) -> RowSlots:
    """So many rows of one request, at position 0."""
    slots = torch.zeros(rows, dtype=torch.int64)
    return RowSlots(slot_table([SamplingParams(seed=1)], vocab_size), slots, slots)


def gpu_schedule(mode: Mode, rows: int) -> Schedule:
    """The schedule that a GPU follows for so many rows."""
    with for_a_gpu():
        return schedule_for(mode, rows, torch.device("cpu"))


def schedule_by_bounds(mode: Mode, rows: int, block: int) -> Schedule:
    """A GPU's schedule that races by bounds in blocks of so many tokens, however few the rows and logits are."""
    made = gpu_schedule(mode, rows)
    return dataclasses.replace(made, races_by_bounds=True, race=made.race._replace(block=block, slices=1))
