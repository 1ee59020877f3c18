"""What calls of torch and the driver take by themselves, which no step of the same calls can be faster than."""

from __future__ import annotations

import itertools
import statistics
import struct
import time
from collections.abc import Callable

import torch

from tools.bench.host.turns import Timed, in_turns, timed

COPY, LAUNCH = "bare copy from pinned", "bare graph launch"
ALONE, IN_STEP = "in a loop of its own", "between Python"
_WORK_US = 12  # of Python before each call: about as much as a step of ours has there
_BATCH = 64  # numbers that one pass of that Python looks at


def bare_calls(device: torch.device) -> dict[tuple[str, str], Timed]:
    """The copy and the graph launch that a step needs at least, alone and after other code, by their names.

    After other code a call takes up to twice as long: the caches of the processor hold that code, and no longer torch's
    and the driver's.
    """
    copy, launch = _copy_and_launch(device)
    work = python_work(_WORK_US)
    return {
        (COPY, ALONE): timed(copy),
        (LAUNCH, ALONE): timed(launch),
        (COPY, IN_STEP): after(work, copy),
        (LAUNCH, IN_STEP): after(work, launch),
    }


def after(work: Callable[[], object], step: Callable[[], object]) -> Timed:
    """A call of a step, which counts, after some work, which does not."""

    def call() -> int:
        work()
        start = time.perf_counter_ns()
        step()
        return time.perf_counter_ns() - start

    return call


def python_work(us: float) -> Callable[[], object]:
    """Ordinary Python that takes about so many microseconds: it packs, hashes and looks up other numbers each time."""
    batches = itertools.cycle([tuple(range(first, first + _BATCH)) for first in range(200)])
    known: dict[object, int] = {}

    def one_pass() -> None:
        numbers = next(batches)
        words = struct.pack(f"{_BATCH}q", *numbers)
        key = "step", len(numbers), words, sum(numbers), max(numbers)
        fields = {"slots": words, "rows": len(numbers), "width": max(numbers, default=0)}
        known[key] = known.get(key, 0) + len({**fields, "words": words[:8]})

    one_us = statistics.median([timed(one_pass)() for _ in range(1000)]) / 1e3
    passes = range(max(1, round(us / one_us)))

    def work() -> None:
        for _ in passes:
            one_pass()

    return work


def floors_us(device: torch.device, seconds: float) -> dict[str, float]:
    """Microseconds of the host for a bare graph launch, a bare small copy of each kind, and other calls of torch."""
    copy, launch = _copy_and_launch(device)
    there = torch.zeros(512, dtype=torch.int64, device=device)
    other, short = there.clone(), there[:8].int()
    pair = [there[:128], there[128:256]], [other[:128], other[128:256]]
    calls: dict[str, Callable[[], object]] = {
        "graph launch": launch,
        "copy": lambda: there.copy_(other, non_blocking=True),
        "copy from pinned": copy,
        "copy from pinned, then graph launch": lambda: (copy(), launch()),
        "two copies in one launch": lambda: torch._foreach_copy_(*pair),
        "fill": lambda: short.fill_(3),
        "allocation": lambda: torch.empty(128, dtype=torch.int64, device=device),
        "slice": lambda: there[:128],
        "view of another dtype": lambda: there.view(torch.int32),
        "is capturing": torch.cuda.is_current_stream_capturing,
    }
    found = in_turns({name: timed(call) for name, call in calls.items()}, seconds, torch.cuda.synchronize)
    return {name: statistics.median(rounds) for name, rounds in found.items()}


def _copy_and_launch(device: torch.device) -> tuple[Callable[[], object], Callable[[], object]]:
    """A copy of 4 KiB from pinned memory, and the launch of a graph of one kernel."""
    graph, there = torch.cuda.CUDAGraph(), torch.zeros(512, dtype=torch.int64, device=device)
    with torch.cuda.graph(graph):
        there.add_(1)
    here = torch.zeros(512, dtype=torch.int64).pin_memory()
    return lambda: there.copy_(here, non_blocking=True), graph.replay
