"""How long does a step keep the host busy, and what does it ask of the driver?

All steps of a batch size, those of others and the floor take turns of 50 calls, since the host of a GPU machine may
change its speed for seconds. A cell is the median of its rounds' medians, as the host sees a call: calls are issued
without a wait, and the device is waited for between rounds, outside of what is timed. The floor of a step is one bare
graph launch and one bare small asynchronous copy through torch, in loops of their own, and between ordinary Python, as
a step pays for them. What the driver is asked for is counted by torch's profiler. Logits, positions and ``out`` are
the same in each step, as an engine brings them, and are bound. Every mode is captured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import statistics
import struct
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from compiled_sampler import Sampler
from tools.bench.baselines import BY_ROW, OF_ALL, baselines_of
from tools.bench.batches import Batch
from tools.bench.cases import CASES
from tools.bench.host_steps import MODES, WAY, WAY_MODES, Step, bound_to, num_slots, sampled_steps, verifying_steps
from tools.measuring import environment, write_json

ROWS, REQUESTS = [1, 8, 128, 256], [64, 512]
_SECONDS, _SECONDS_ALONE = 6.0, 1.0  # of turns: of a batch size, of the calls of torch alone
_PROFILED = 20  # steps
_ASKED = {
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "graphs": ("cudaGraphLaunch",),
    "copies": ("cudaMemcpyAsync", "cudaMemsetAsync"),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
}
"""Functions of the driver and the runtime, by what they are counted as."""
COPY, LAUNCH = "bare copy from pinned", "bare graph launch"
ALONE, IN_STEP = "in a loop of its own", "between Python"
_WORK_US = 12  # of Python before each call: about as much as a step of ours has there
_BATCH = 64  # numbers that one pass of that Python looks at
Timed = Callable[[], int]
"""A call that returns how many nanoseconds of it count."""
Name = TypeVar("Name", bound=Hashable)
ROUND = 50
"""Calls of a round."""
LOW = 0.1
"""The quantile of rounds that tells what a call takes where the machine is fast."""


def timed(step: Callable[[], object]) -> Timed:
    """A call of a step all of which counts."""

    def call() -> int:
        start = time.perf_counter_ns()
        step()
        return time.perf_counter_ns() - start

    return call


def in_turns(calls: Mapping[Name, Timed], seconds: float, wait: Callable[[], object]) -> dict[Name, list[float]]:
    """The median microseconds of a call in each of its rounds, by name.

    All calls have a round in each turn, in an order that is drawn anew; a first turn is not counted.

    Args:
        calls: by name.
        seconds: after which no further turn begins; one is counted in any case.
        wait: called before each round, for what earlier calls left to a device.
    """
    chance, order = random.Random(0), list(calls)
    found: dict[Name, list[float]] = {name: [] for name in calls}
    for name in order:
        _round_us(calls[name], wait)
    end = time.monotonic() + seconds
    while True:
        chance.shuffle(order)
        for name in order:
            found[name].append(_round_us(calls[name], wait))
        if time.monotonic() >= end:
            return found


def _round_us(call: Timed, wait: Callable[[], object]) -> float:
    wait()
    return statistics.median([call() for _ in range(ROUND)]) / 1e3


def low_of(rounds: list[float]) -> float:
    """The quantile ``LOW`` of the medians of rounds."""
    return sorted(rounds)[int(LOW * len(rounds))]


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


@dataclasses.dataclass(frozen=True)
class HostCell:
    """One measurement; times are microseconds of the host for one step."""

    step: str
    requests: str
    """The name of their parameters, one of ``MIXES``; of a bare call where it is made."""
    rows: int
    """R, with drafts the number of requests."""
    us: float
    low_us: float
    """The quantile ``LOW`` of its rounds."""
    floor_us: float
    """A copy and a graph launch in loops of their own, in turns with the step."""
    floor_in_step_us: float
    """Both between ordinary Python."""
    asked: dict[str, float]
    """What one step asks of the driver and of torch's allocator, by kind."""


def asked_of_the_driver(step: Callable[[], object]) -> dict[str, float]:
    """Calls of the driver and allocations of one step, by kind, the mean of several."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(_PROFILED):
        step()
    allocations = (torch.cuda.memory_stats()["allocation.all.allocated"] - before) / _PROFILED
    own_waits = _waits_of_a_profile()
    counts = _profiled(lambda: [step() for _ in range(_PROFILED)])
    counts["waits"] -= own_waits
    return {kind: count / _PROFILED for kind, count in counts.items()} | {"allocations": allocations}


@functools.cache
def _waits_of_a_profile() -> int:
    """The waits of a profile of nothing, which are its own: of a second one, as a process' first may miss some."""
    for _ in range(2):
        found = _profiled(lambda: None)
    return found["waits"]


def _profiled(work: Callable[[], object]) -> dict[str, int]:
    """What some work asks of the driver, and a wait for it at the end, by kind."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    seen = Counter(event.name for event in found.events() or ())
    return {kind: sum(seen[name] for name in names) for kind, names in _ASKED.items()}


def peers(logits: torch.Tensor) -> Iterator[tuple[tuple[str, str], Step]]:
    """What else a user would call, by its name and the parameters of all requests; of engines that are installed."""
    softmax = "torch, softmax + multinomial", "no filter"
    yield softmax, lambda: torch.multinomial(torch.softmax(logits / 0.8, -1), 1)
    batch = Batch(logits, torch.arange(logits.shape[0], device=logits.device))
    for case in (CASES["k 50 + p .9"], CASES["no_filter"]):
        for name, call in baselines_of(case).items():
            if name in (BY_ROW, OF_ALL, "vLLM") and not isinstance(call, str):
                yield (name, case.name), functools.partial(call, batch)


def steps_by_size(
    batches: Sequence[int], verified: Sequence[int], vocab_size: int, device: torch.device
) -> Iterator[tuple[int, dict[tuple[str, str], Step]]]:
    """Each batch size with all of its steps, by their names and those of their parameters, until the next one.

    Args:
        batches: rows of sampled batches.
        verified: requests of verified batches.
        vocab_size: V.
        device: of the samplers.
    """
    logits = torch.randn(max([*batches, *((WAY.width + 1) * n for n in verified)]), vocab_size, device=device)
    sampler = Sampler(vocab_size, num_slots(max(batches, default=0)), device, buckets=batches or [1])
    verifier = Sampler(vocab_size, sum(verified) or 1, device, buckets=verified or [1], verifications=[WAY])
    bound = bound_to(sampler, logits), bound_to(verifier, logits, verifies=True)
    for each, modes, sizes in ((sampler, MODES, batches), (verifier, WAY_MODES, verified)):
        if sizes:
            each.warmup(modes=modes)
    for size in sorted({*batches, *verified}):
        steps: dict[tuple[str, str], Step] = {}
        with contextlib.ExitStack() as held:
            if size in batches:
                steps |= held.enter_context(sampled_steps(sampler, bound[0], size))
                steps |= dict(peers(logits[:size]))
            if size in verified:
                steps |= verifying_steps(verifier, bound[1], size)
            yield size, steps


def cells_of(size: int, steps: Mapping[tuple[str, str], Step], device: torch.device) -> list[HostCell]:
    """The cells of all steps of one batch size, then those of the floor, which took turns."""
    calls = {**{names: timed(step) for names, step in steps.items()}, **bare_calls(device)}
    asked = {names: asked_of_the_driver(call) for names, call in calls.items()}
    rounds = in_turns(calls, _SECONDS, torch.cuda.synchronize)
    us = {names: statistics.median(each) for names, each in rounds.items()}
    floors = [us[COPY, where] + us[LAUNCH, where] for where in (ALONE, IN_STEP)]
    return [HostCell(*names, size, us[names], low_of(rounds[names]), *floors, asked[names]) for names in calls]


def table_of(cells: Sequence[HostCell]) -> Table:
    """A line a cell."""
    columns = (*_ASKED, "allocations")
    times = "us", "low", "floor", "in a step"
    table = Table("step", "requests", "rows", *times, *columns, title="us of the host for a step")
    for each in cells:
        shown = [f"{us:.1f}" for us in (each.us, each.low_us, each.floor_us, each.floor_in_step_us)]
        counts = [f"{each.asked[kind]:.1f}" for kind in columns]
        table.add_row(each.step, each.requests, str(each.rows), *shown, *counts)
    return table


def run(batches: Sequence[int], verified: Sequence[int], vocab_size: int, path: str | None) -> None:
    """Measure, print, store in a file of JSON."""
    console, facts, device = Console(width=150, highlight=False), environment("cuda"), torch.device("cuda", 0)
    floors, cells = floors_us(device, _SECONDS_ALONE), list[HostCell]()
    for size, steps in steps_by_size(batches, verified, vocab_size, device):
        cells += (found := cells_of(size, steps, device))
        console.print(table_of(found))
        if path:
            content: dict[str, Any] = {**facts, "floors": floors, "table": [dataclasses.asdict(each) for each in cells]}
            write_json(path, content)
    console.print({name: round(us, 1) for name, us in floors.items()})
