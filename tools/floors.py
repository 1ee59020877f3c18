"""The least time that a call can take: memory, dependent launches, or instructions, whichever binds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tools.bench_cases import Case

INSTRUCTIONS = {
    "order": 9.5,  # the best of a block
    "mass": 27.0,  # a polynomial weight and its int64 sum
    "race": 23.8,  # a bound of the score of a token, and the largest of a block; a score takes 58.5
}
"""SASS instructions that a pass over the row executes for each logit.

Counted in the kernels that Inductor of torch 2.11 makes for compute capability 9.0, per thread and logit.
"""

HBM_BYTES_PER_US = {"H200": 4.8e6, "H100 80GB HBM3": 3.35e6}  # NVIDIA's data sheets; the latter is the SXM card
HOPPER_LANES_PER_US = 132 * 4 * 32 * 1.98e3  # SMs, schedulers, lanes of a warp instruction, clocks a us at 1.98 GHz
NODE_US = 0.7  # a dependent kernel of a CUDA graph that starts while the one before ends, measured on an H200

Run = Callable[..., Any]


class Rates(NamedTuple):
    """What a device can do in a microsecond at most."""

    num_bytes: float
    num_instructions: float | None
    """Lane-instructions; None where they are not known."""
    node_us: float
    """Of one dependent kernel; 0 on a CPU."""


class Work(NamedTuple):
    """What a call cannot avoid."""

    num_bytes: float
    num_stages: int
    """One after the other."""
    num_instructions: float


class Floor(NamedTuple):
    """The largest of the lower bounds."""

    us: float
    kind: str
    """What binds: "bytes", "launches" or "instructions"."""


def floor(work: Work, rates: Rates) -> Floor:
    """The bound that binds."""
    bounds = {"bytes": work.num_bytes / rates.num_bytes, "launches": work.num_stages * rates.node_us}
    if rates.num_instructions is not None:
        bounds["instructions"] = work.num_instructions / rates.num_instructions
    kind = max(bounds, key=lambda name: bounds[name])
    return Floor(bounds[kind], kind)


def work_of(case: Case, rows: int, vocab_size: int, itemsize: int, num_stages: int) -> Work:
    """What a call of a case needs.

    Args:
        case: what is computed.
        rows: R, with drafts requests N.
        vocab_size: V.
        itemsize: bytes of a logit.
        num_stages: points of the pipeline at which results are written to memory.
    """
    num_logits = rows * (case.num_drafts + 1) * vocab_size
    num_bytes = num_logits * itemsize
    if case.drafts == "probabilities":
        num_bytes += rows * case.num_drafts * vocab_size * torch.float32.itemsize
    each, final = (sum(INSTRUCTIONS[name] for name in passes) for passes in (case.passes, case.final_passes))
    return Work(num_bytes, num_stages, num_logits * each + rows * vocab_size * final)


def rates(device: torch.device) -> Rates:
    """Of a known GPU by its name; else the bandwidth is measured and the instruction rate unknown."""
    if device.type != "cuda":
        return Rates(copy_bytes_per_us(device), None, 0.0)
    name = torch.cuda.get_device_name(device)
    for known, num_bytes in HBM_BYTES_PER_US.items():
        if known in name:
            return Rates(num_bytes, HOPPER_LANES_PER_US, NODE_US)
    return Rates(copy_bytes_per_us(device), None, NODE_US)


def copy_bytes_per_us(device: torch.device, num_bytes: int = 1 << 27, repeats: int = 5) -> float:
    """Bytes read and written in a microsecond by the fastest of a few copies."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / min(_copy_us(source, target) for _ in range(repeats))


def count_stages(step: Callable[[Run], Any]) -> int:
    """How often a step of the pipeline calls its ``run``."""
    count = 0

    def counting(stage: Any, /, *tensors: Any, **static: Any) -> Any:
        nonlocal count
        count += 1
        return stage(*tensors, **static)

    step(counting)
    return count


def _copy_us(source: Tensor, target: Tensor) -> float:
    _wait(source)
    start = time.perf_counter()
    target.copy_(source)
    _wait(target)
    return (time.perf_counter() - start) * 1e6


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()
