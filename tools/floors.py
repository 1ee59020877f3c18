"""The least time that a call can take: its passes over the logits, and one after the other the kernels besides.

A pass takes what its bytes or its instructions do, whichever binds, and a kernel at least what the smallest dependent
kernel does, or its instructions where these are counted. What small kernels wait for besides is not, so that no call
reaches the floor of a long chain.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_sampler.bounds import race_leaders
from compiled_sampler.choosing import choose_blocks, choose_child_blocks, choose_child_tokens
from compiled_sampler.ranking import choose
from compiled_sampler.wide import wide_threshold
from compiled_sampler.wide_race import race_beyond, race_top_k
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
NODE_US = {1: 0.63, 8: 0.73, 128: 0.96, 512: 1.2}
"""By rows at least, microseconds of a dependent kernel of a CUDA graph that starts while the one before ends.

Measured on an H200: a chain of kernels that each read the 64 numbers a row that the one before wrote, add them up and
write as many; the best of six tilings.
"""

KERNELS: dict[Any, int] = {race_beyond: 4, race_top_k: 4, wide_threshold: 3}
"""Kernels, one after the other, of the stages that have more than one."""

INSTRUCTIONS_A_ROW: dict[Any, tuple[float, ...]] = {
    choose: (128 * 1048.0,),
    choose_blocks: (128 * 976.0,),
    choose_child_blocks: (128 * 1104.0,),
    choose_child_tokens: (128 * 1120.0,),
    race_leaders: (256 * 1248.0,),
    race_top_k: (256 * 3371.0, 256 * 1477.0),  # the bracket, and of a short list the race that its first winner wins
}
"""By stage, of each of its kernels that has many: threads for a row, times the SASS instructions that each executes."""

Run = Callable[..., Any]


class Rates(NamedTuple):
    """What a device can do in a microsecond at most."""

    num_bytes: float
    num_instructions: float | None
    """Lane-instructions; None where they are not known."""
    node_us: Mapping[int, float]
    """Of one dependent kernel, by the least number of rows that it holds for; empty on a CPU, where there are none."""


class Chain(NamedTuple):
    """The kernels of a call that run one after the other."""

    num_kernels: int
    small: tuple[float, ...]
    """Instructions a row of those in ``INSTRUCTIONS_A_ROW``."""


class Work(NamedTuple):
    """What a call cannot avoid."""

    num_rows: int
    """Of logits."""
    num_bytes: float
    num_passes: int
    """Kernels that read every logit."""
    num_instructions: float
    """Of the passes."""
    chain: Chain
    """All kernels."""


class Floor(NamedTuple):
    """What passes and launches take together."""

    us: float
    kind: str
    """What takes the most of it: "bytes", "launches" or "instructions"."""


def floor(work: Work, rates: Rates) -> Floor:
    """The passes by the bound that binds them, and the other kernels one after the other."""
    chain = work.chain
    node_us = max((us for rows, us in rates.node_us.items() if rows <= work.num_rows), default=0.0)
    bounds = {"bytes": work.num_bytes / rates.num_bytes, "launches": work.num_passes * node_us}
    if rates.num_instructions is not None:
        bounds["instructions"] = work.num_instructions / rates.num_instructions
    kind = max(bounds, key=lambda name: bounds[name])
    small = [0.0 if rates.num_instructions is None else work.num_rows * n / rates.num_instructions for n in chain.small]
    plain = max(chain.num_kernels - work.num_passes - len(small), 0)
    others = plain * node_us + sum(max(us, node_us) for us in small)
    return Floor(bounds[kind] + others, kind if bounds[kind] > others else "launches")


def work_of(case: Case, rows: int, vocab_size: int, itemsize: int, chain: Chain) -> Work:
    """What a call of a case needs.

    Args:
        case: what is computed.
        rows: R, with drafts requests N.
        vocab_size: V.
        itemsize: bytes of a logit.
        chain: its kernels, see ``chain_of``.
    """
    num_rows = rows * (case.num_drafts + 1)
    num_logits = num_rows * vocab_size
    num_bytes = num_logits * itemsize
    if case.drafts == "probabilities":
        num_bytes += rows * case.num_drafts * vocab_size * torch.float32.itemsize
    each, final = (sum(INSTRUCTIONS[name] for name in passes) for passes in (case.passes, case.final_passes))
    num_passes = len(case.passes) + len(case.final_passes)
    return Work(num_rows, num_bytes, num_passes, num_logits * each + rows * vocab_size * final, chain)


def rates(device: torch.device) -> Rates:
    """Of a known GPU by its name; else the bandwidth is measured and the instruction rate unknown."""
    if device.type != "cuda":
        return Rates(copy_bytes_per_us(device), None, {})
    num_bytes = known_bytes_per_us(torch.cuda.get_device_name(device))
    if num_bytes is None:
        return Rates(copy_bytes_per_us(device), None, NODE_US)
    return Rates(num_bytes, HOPPER_LANES_PER_US, NODE_US)


def known_bytes_per_us(name: str) -> float | None:
    """What a whole GPU of that name reads at most; None for others, a GH200 and a part of a GPU (MIG) among them."""
    if "MIG" in name:
        return None
    found = (each for known, each in HBM_BYTES_PER_US.items() if re.search(rf"\b{known}\b", name))
    return next(found, None)


def copy_bytes_per_us(device: torch.device, num_bytes: int = 1 << 27, repeats: int = 5) -> float:
    """Bytes read and written in a microsecond by the fastest of a few copies."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / min(_copy_us(source, target) for _ in range(repeats))


def chain_of(step: Callable[[Run], Any]) -> Chain:
    """The kernels that a step of the pipeline launches at least, one after the other: of two chains the longer."""
    counting = _Counting()
    step(counting)
    return counting.chain


class _Counting:
    """Runs stages in eager torch, and counts their kernels."""

    def __init__(self) -> None:
        self.chain = Chain(0, ())

    def __call__(self, stage: Any, /, *tensors: Any, **static: Any) -> Any:
        count, small = self.chain
        counted = INSTRUCTIONS_A_ROW.get(stage, ())
        self.chain = Chain(count + KERNELS.get(stage, 1), small + counted)
        return stage(*tensors, **static)

    def both(self, device: torch.device, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
        before, one = self.chain, first()
        longest, self.chain = self.chain, before
        other = second()
        self.chain = max(self.chain, longest)
        return one, other


def _copy_us(source: Tensor, target: Tensor) -> float:
    _wait(source)
    start = time.perf_counter()
    target.copy_(source)
    _wait(target)
    return (time.perf_counter() - start) * 1e6


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()
