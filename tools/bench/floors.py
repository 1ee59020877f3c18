"""The least time that a call can take: its passes over the logits, and one after the other the kernels besides.

A pass takes what its bytes or its instructions do, whichever binds, and the time that it needs to begin. A kernel takes
what the smallest dependent kernel does and, where they are counted, its instructions. What small kernels wait for
besides, loads and each other's sums, is not counted, so that no call reaches the floor of a long chain.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tools
from compiled_sampler.core.stage import Run
from compiled_sampler.lowering.tuning import tuning_of
from compiled_sampler.passes.bounds import race_bounds
from compiled_sampler.passes.race import race_maxima
from compiled_sampler.pipeline.chunks import without_kernels
from tools.bench.cases import Case

_COUNTED = json.loads((Path(tools.__file__).parent / "results" / "instructions.json").read_text())

INSTRUCTIONS: dict[str, float] = _COUNTED["instructions_per_logit"]
"""SASS instructions that a pass over the row executes for each logit, by thread; of one torch and one architecture."""

RACE = "race"
"""Of a case's passes, the one that is ``Chain.race``: scores or bounds, as the library takes for so many rows."""

HBM_BYTES_PER_US = {"H200": 4.8e6, "H100 80GB HBM3": 3.35e6}  # NVIDIA's data sheets; the latter is the SXM card
CLOCKS_PER_US = 1.98e3
HOPPER_LANES_PER_US = 132 * 4 * 32 * CLOCKS_PER_US  # SMs, schedulers, lanes of a warp instruction
PASS_START_US = 1.2
"""What a pass over the logits takes at least beyond its bytes, measured on an H200.

A Triton kernel that stores the maximum of each block and depends on the kernel before, in the best of seven tilings,
takes from 1.2 more, for 1 MB, to 3.1 more, for 311 MB.
"""
NODE_US = {1: 0.63, 8: 0.73, 128: 0.96, 512: 1.2}
"""By rows at least, microseconds of a dependent kernel of a CUDA graph that starts while the one before ends.

Measured on an H200: a chain of kernels that each read the 64 numbers a row that the one before wrote, add them up and
write as many; the best of six tilings.
"""

SMALL: dict[tuple[str, int | None], tuple[tuple[int, int], ...]] = {
    (each["stage"], each["block"]): tuple(
        (kernel["threads_per_row"], kernel["instructions_per_thread"]) for kernel in each["kernels"]
    )
    for each in _COUNTED["small_kernels"]
}
"""By stage and, of some, tokens a block, of each of its kernels that has many: threads for a row, and the SASS
instructions that each executes."""


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
    small: tuple[tuple[int, int], ...] = ()
    """Of those in ``SMALL``."""
    race: tuple[str, ...] = ("bound",)
    """Names of ``INSTRUCTIONS``: the passes of its race over rows, if it has one."""


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
    bounds, start_us = {"bytes": work.num_bytes / rates.num_bytes}, 0.0
    if rates.num_instructions is not None:
        bounds["instructions"] = work.num_instructions / rates.num_instructions
        start_us = PASS_START_US
    kind = max(bounds, key=lambda name: bounds[name])
    plain = max(chain.num_kernels - work.num_passes - len(chain.small), 0)
    small = sum(_small_us(work.num_rows, each, node_us, rates) for each in chain.small)
    launches = work.num_passes * max(start_us, node_us) + plain * node_us + small
    return Floor(bounds[kind] + launches, kind if bounds[kind] > launches else "launches")


def _small_us(num_rows: int, small: tuple[int, int], node_us: float, rates: Rates) -> float:
    """What a small kernel takes: a warp executes an instruction a clock at most, and all of them what the GPU can."""
    threads, count = small
    if rates.num_instructions is None:
        return node_us
    return max(num_rows * threads * count / rates.num_instructions, node_us + count / CLOCKS_PER_US)


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
    passes, final_passes = (_named(names, chain) for names in (case.passes, case.final_passes))
    each, final = (sum(INSTRUCTIONS[name] for name in names) for names in (passes, final_passes))
    num_passes = len(passes) + len(final_passes)
    return Work(num_rows, num_bytes, num_passes, num_logits * each + rows * vocab_size * final, chain)


def _named(passes: tuple[str, ...], chain: Chain) -> tuple[str, ...]:
    """The passes, those of a race by name."""
    return tuple(each for name in passes for each in (chain.race if name == RACE else (name,)))


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


class _Counting(Run):
    """Runs stages in eager torch, and counts their kernels."""

    def __init__(self) -> None:
        super().__init__(fuses=True)
        self.chain = Chain(0)

    def __call__(self, stage: Any, /, *tensors: Any, **static: Any) -> Any:
        count, small, race = self.chain
        name = stage.__name__
        counted = SMALL.get((name, static.get("block")), SMALL.get((name, None), ()))
        if stage is race_maxima:  # which takes the rows' largest logits, of a pass before, where there is min_p
            race = ("score",) if tensors[2] is None else ("order", "score")
        if stage is race_bounds and static["finds_max"]:
            race = ("bound and order",)
        self.chain = Chain(count + tuning_of(stage).num_kernels, small + counted, race)
        return without_kernels(stage, *tensors, **static)

    def overlap(self, device: torch.device, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
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
