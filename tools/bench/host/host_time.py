"""How long does a step keep the host busy, and what does it ask of the driver?

All steps of a batch size, those of others and the floor take turns of 50 calls, since the host of a GPU machine may
change its speed for seconds. A cell is the median of its rounds' medians, as the host sees a call: calls are issued
without a wait, and the device is waited for between rounds, outside of what is timed. The floor of a step is one bare
graph launch and one bare small asynchronous copy through torch, in loops of their own, and between ordinary Python, as
a step pays for them. What the driver is asked for is counted by torch's profiler. Logits, positions and ``out`` come
back in each step, as an engine brings them, and are captured as they were seen. Every mode is captured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from compiled_sampler import Sampler
from tools.bench.calls.baselines import baselines_of
from tools.bench.calls.batches import Batch
from tools.bench.calls.cases import CASES
from tools.bench.host.host_floors import ALONE, COPY, IN_STEP, LAUNCH, bare_calls, floors_us
from tools.bench.host.host_steps import MODES, WAY, WAY_MODES, Step, num_slots, sampled_steps, verifying_steps
from tools.bench.host.turns import in_turns, low_of, timed
from tools.measuring.environment import environment, write_json

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
    """The quantile ``turns.LOW`` of its rounds."""
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
            if name in ("FlashInfer", "vLLM") and not isinstance(call, str):
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
    for each, modes, sizes in ((sampler, MODES, batches), (verifier, WAY_MODES, verified)):
        each.bind_logits(logits)
        if sizes:
            each.warmup(modes=modes)
    for size in sorted({*batches, *verified}):
        steps: dict[tuple[str, str], Step] = {}
        with contextlib.ExitStack() as held:
            if size in batches:
                steps |= held.enter_context(sampled_steps(sampler, logits, size))
                steps |= dict(peers(logits[:size]))
            if size in verified:
                steps |= verifying_steps(verifier, logits, size)
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
