"""What does a replay of a captured call cost the host? Allocations, waits for the device, and time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from compiled_sampler.conformance.bench import Bench, NotAsked
from compiled_sampler.conformance.question import Finding, question
from compiled_sampler.conformance.rows import WIDE_VOCAB, hard_batch

ROWS, REPLAYS, BUSY_REPLAYS = 64, 200, 10

BUSY_CYCLES = 100_000_000
"""Clock cycles that the device is kept busy for: some 50 ms, and longer than the host takes for any replay."""


class Device:
    """What is measured of a CUDA device."""

    def __init__(self, bench: Bench) -> None:
        if bench.device.type != "cuda":
            raise NotAsked("only on CUDA")
        self.device = bench.device

    def settle(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self.device)

    def allocations(self) -> int:
        """Blocks that torch has handed out so far."""
        return int(torch.cuda.memory_stats(self.device).get("allocation.all.allocated", 0))

    def keep_busy(self) -> Callable[[], bool]:
        """Give the device work for a while; the function that is returned tells whether it goes on."""
        cuda: Any = torch.cuda  # which has no types for these
        cuda._sleep(BUSY_CYCLES)
        end = cuda.Event()
        end.record()
        return lambda: not end.query()


def replay_of(bench: Bench) -> Callable[[], object]:
    """A function that replays a captured call for its requests, after a few replays."""
    capture = bench.method("capture", WIDE_VOCAB)
    batch = hard_batch(bench, ROWS)
    logits, positions = batch.logits.to(bench.device), torch.tensor(batch.positions)
    replay = capture(logits, batch.params, batch.seeds, positions)
    positions = positions.to(bench.device)

    def step() -> object:
        return replay(logits, batch.params, batch.seeds, positions)

    for _ in range(3):
        step()
    return step


@question("cost.allocations", "a replay allocates nothing on the device", f"one allocation in {REPLAYS} replays")
def allocations(bench: Bench) -> Finding:
    device, step = Device(bench), replay_of(bench)
    device.settle()
    before = device.allocations()
    for _ in range(REPLAYS):
        step()
    allocated = device.allocations() - before
    return Finding(allocated == 0, f"{allocated} allocations in {REPLAYS} replays")


@question("cost.synchronisations", "a replay never waits for the device", f"one wait in {BUSY_REPLAYS}")
def waits(bench: Bench) -> Finding:
    device, step = Device(bench), replay_of(bench)
    late = 0
    for _ in range(BUSY_REPLAYS):
        device.settle()
        is_busy = device.keep_busy()
        step()
        late += not is_busy()
    return Finding(late == 0, f"{late} of {BUSY_REPLAYS} replays returned after the work before them had ended")


@question("cost.host_time", "a replay keeps the host no longer than declared", "a median above what is declared")
def host_time(bench: Bench) -> Finding:
    device, step = Device(bench), replay_of(bench)
    times = []
    for _ in range(REPLAYS):
        device.settle()
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e6)
    median_us, most = statistics.median(times), bench.semantics.replay_us
    detail = f"{median_us:.0f} us of the host for a replay of {ROWS} rows, declared are {most:.0f}"
    return Finding(median_us <= most, detail, f"a median above {most:.0f} us")
