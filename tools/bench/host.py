"""How long does a step keep the host busy, and what does it ask of the driver?

A cell is the median time of one call, as the host sees it: calls are issued without a wait, and the device is waited
for between rounds, outside of what is timed. The floor of a step is one bare graph launch and one bare small
asynchronous copy through torch, measured in the same process. What the driver is asked for is counted by torch's
profiler. Logits, positions and ``out`` come back in each step, as an engine brings them, and are captured as they were
seen. Every mode is captured.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from compiled_sampler import Sampler, Verification
from tools.bench.baselines import baselines_of
from tools.bench.batches import Batch
from tools.bench.cases import CASES
from tools.bench.host_steps import MIXES, MODES, Steps, verifications
from tools.measuring.environment import environment, write_json

ROWS, REQUESTS = [1, 8, 128, 256], [64, 512]
_CALLS, _ROUND, _PROFILED = 2_000, 50, 20
_ASKED = {
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "graphs": ("cudaGraphLaunch",),
    "copies": ("cudaMemcpyAsync", "cudaMemsetAsync"),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
}
"""Functions of the driver and the runtime, by what they are counted as."""


@dataclasses.dataclass(frozen=True)
class HostCell:
    """One measurement; times are microseconds of the host for one step."""

    step: str
    requests: str
    """The name of their parameters, one of ``MIXES``."""
    rows: int
    """R, with drafts the number of requests."""
    us: float
    floor_us: float
    asked: dict[str, float]
    """What one step asks of the driver and of torch's allocator, by kind."""


def median_us(step: Callable[[], object], calls: int = _CALLS) -> float:
    """The median time in microseconds that a call keeps the host busy."""
    for _ in range(_ROUND):
        step()
    taken = []
    for done in range(calls):
        if done % _ROUND == 0:
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        step()
        taken.append(time.perf_counter_ns() - start)
    torch.cuda.synchronize()
    return statistics.median(taken) / 1e3


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


def floor_us(device: torch.device) -> dict[str, float]:
    """Microseconds of the host for a bare graph launch, a bare small copy of each kind, and other calls of torch."""
    graph, there = torch.cuda.CUDAGraph(), torch.zeros(512, dtype=torch.int64, device=device)
    with torch.cuda.graph(graph):
        there.add_(1)
    here, other, short = torch.zeros(512, dtype=torch.int64).pin_memory(), there.clone(), there[:8].int()
    pair = [there[:128], there[128:256]], [other[:128], other[128:256]]

    def copy_and_launch() -> None:
        there.copy_(here, non_blocking=True)
        graph.replay()

    return {
        "graph launch": median_us(graph.replay),
        "copy": median_us(lambda: there.copy_(other, non_blocking=True)),
        "copy from pinned": median_us(lambda: there.copy_(here, non_blocking=True)),
        "copy from pinned, then graph launch": median_us(copy_and_launch),
        "two copies in one launch": median_us(lambda: torch._foreach_copy_(*pair)),
        "fill": median_us(lambda: short.fill_(3)),
        "allocation": median_us(lambda: torch.empty(128, dtype=torch.int64, device=device)),
        "slice": median_us(lambda: there[:128]),
        "view of another dtype": median_us(lambda: there.view(torch.int32)),
        "is capturing": median_us(torch.cuda.is_current_stream_capturing),
    }


def peers(logits: torch.Tensor) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """What else a user would call: a name, the parameters of all requests, the call; of engines that are installed."""
    yield "torch, softmax + multinomial", "no filter", lambda: torch.multinomial(torch.softmax(logits / 0.8, -1), 1)
    batch = Batch(logits, torch.arange(logits.shape[0], device=logits.device))
    for case in (CASES["k 50 + p .9"], CASES["no_filter"]):
        for name, call in baselines_of(case).items():
            if name in ("FlashInfer", "vLLM") and not isinstance(call, str):
                yield name, case.name, functools.partial(call, batch)


def measured(
    batches: Sequence[int],
    verified: Sequence[int],
    vocab_size: int,
    floors: dict[str, float],
    report: Callable[[HostCell], None],
) -> None:
    """Report every cell as it is found.

    Args:
        batches: rows of sampled batches.
        verified: requests of verified batches.
        vocab_size: V.
        floors: from ``floor_us``.
        report: takes a cell.
    """
    device = torch.device("cuda", 0)
    floor = floors["graph launch"] + floors["copy from pinned"]
    most = max([*batches, *(4 * each for each in verified)])
    logits = torch.randn(most, vocab_size, device=device)
    largest = max([1, *batches])
    sampler = Sampler(vocab_size, 2 * largest + 128, device, buckets=batches or [1])
    sampler.bind_logits(logits)
    if batches:
        sampler.warmup(modes=MODES)

    def cell(step: str, mix: str, rows: int, call: Callable[[], Any]) -> None:
        report(HostCell(step, mix, rows, median_us(call), floor, asked_of_the_driver(call)))

    for rows in batches:
        for mix, params in MIXES.items():
            steps = Steps(sampler, logits, params, rows)
            for name, call in steps.named():
                cell(name, mix, rows, call)
            steps.close()
        for name, mix, call in peers(logits[:rows]):
            cell(name, mix, rows, call)
    if verified:
        ways = [Verification("match", 3)]
        verifier = Sampler(vocab_size, sum(verified), device, buckets=verified, verifications=ways)
        verifier.bind_logits(logits)
        verifier.warmup(modes=["top_k_top_p[64]"])
        for requests in verified:
            for name, call in verifications(verifier, logits, requests, 3):
                cell(name, "k 50 + p .9", requests, call)


def table_of(cells: Sequence[HostCell]) -> Table:
    """A line a cell."""
    columns = (*_ASKED, "allocations")
    table = Table("step", "requests", "rows", "us", "floor", *columns, title="us of the host for a step")
    for each in cells:
        counts = [f"{each.asked[kind]:.1f}" for kind in columns]
        table.add_row(each.step, each.requests, str(each.rows), f"{each.us:.1f}", f"{each.floor_us:.1f}", *counts)
    return table


def run(batches: Sequence[int], verified: Sequence[int], vocab_size: int, path: str | None) -> None:
    """Measure, print, store in a file of JSON."""
    cells: list[HostCell] = []
    console, facts, floors = Console(width=130, highlight=False), environment("cuda"), floor_us(torch.device("cuda", 0))

    def report(cell: HostCell) -> None:
        cells.append(cell)
        console.print(f"{cell.step}, {cell.requests}, {cell.rows}: {cell.us:.1f} us")
        if path:
            write_json(path, {**facts, "floors": floors, "table": [dataclasses.asdict(each) for each in cells]})

    measured(batches, verified, vocab_size, floors, report)
    console.print(table_of(cells), {name: round(us, 1) for name, us in floors.items()})
