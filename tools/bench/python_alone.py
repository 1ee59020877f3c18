"""How much of a step is Python? The steps of tools/bench/host_steps.py on a CPU, whose replays do nothing.

What is left is what the host does between the driver's calls, and the copies of new numbers, which on a CPU are short.
A round is a hundred calls; a cell is the least median of all rounds, which other work on the machine does not move.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table

from compiled_sampler import Sampler, Verification
from tools.bench.host_steps import MIXES, MODES, Steps, verifications

T = TypeVar("T")
_ROUNDS, _ROUND = 60, 100
_VOCAB_SIZE = 1_000  # no time depends on it


class NoDevice:
    """A capture backend whose replays do nothing."""

    def capturing(self) -> bool:
        """Nobody captures."""
        return False

    def warm_up(self, work: Callable[[], T]) -> T:
        """The result of one call."""
        return work()

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """What does nothing."""
        work()
        return lambda: None

    def pool_bytes(self) -> int:
        """None."""
        return 0

    def reset(self) -> None:
        """Nothing is held."""


def replaying_nothing(sampler: Sampler) -> Sampler:
    """A sampler made with the backend "eager", which takes the way of "graph" from now on."""
    sampler._runner.backend = "graph"
    sampler._runner._cache._variants.backend = NoDevice()
    return sampler


def least_us(step: Callable[[], object]) -> float:
    """Microseconds of a call: the median of a round, the least of all rounds."""
    found = []
    for _ in range(_ROUNDS):
        taken = []
        for _ in range(_ROUND):
            start = time.perf_counter_ns()
            step()
            taken.append(time.perf_counter_ns() - start)
        found.append(statistics.median(taken))
    return min(found) / 1e3


def sampled(rows: int) -> Iterator[tuple[str, str, float]]:
    """Each step of a sampled batch: its name, the requests, its microseconds."""
    sampler = replaying_nothing(Sampler(_VOCAB_SIZE, 2 * rows + 128, backend="eager", buckets=[rows]))
    logits = torch.randn(rows, _VOCAB_SIZE)
    sampler.bind_logits(logits)
    sampler.warmup(modes=MODES)
    for mix, params in MIXES.items():
        steps = Steps(sampler, logits, params, rows)
        for name, call in steps.named():
            yield name, mix, least_us(call)
        steps.close()


def verified(requests: int, width: int = 3) -> Iterator[tuple[str, str, float]]:
    """Each step that verifies other numbers of drafts each time: its name, the requests, its microseconds."""
    ways = [Verification("match", width)]
    sampler = replaying_nothing(Sampler(_VOCAB_SIZE, requests, backend="eager", buckets=[requests], verifications=ways))
    logits = torch.randn((width + 1) * requests, _VOCAB_SIZE)
    sampler.bind_logits(logits)
    sampler.warmup(modes=["top_k_top_p[64]"])
    for name, call in verifications(sampler, logits, requests, width):
        yield name, "k 50 + p .9", least_us(call)


def run(batches: Sequence[int], requests: Sequence[int]) -> None:
    """Measure and print, a line a step."""
    sizes = sorted({*batches, *requests})
    cells: dict[tuple[str, str], dict[int, float]] = {}
    for size in sizes:
        found = [*(sampled(size) if size in batches else ()), *(verified(size) if size in requests else ())]
        for name, mix, us in found:
            cells.setdefault((name, mix), {})[size] = us
    table = Table("step", "requests", *(f"B={size}" for size in sizes), title="us of Python in a step")
    for names, by_size in cells.items():
        table.add_row(*names, *(f"{by_size[size]:.1f}" if size in by_size else "" for size in sizes))
    Console(width=130, highlight=False).print(table)
