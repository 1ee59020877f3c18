"""How soon is the first token there, and what do steps take while their kernels are built?

    python -m tools.bench --start [--cases greedy "p .9" ...] [--verify] [--rows 8] [--vocab 151936] [--json FILE]

For each case two processes, one after the other: the first with an empty cache in a folder of its own, the next with
what the first stored. Each draws with the default backend until all stages are compiled, and then with eager torch. In
the table: the first draw, after import and constructor; when the compiled form took over; the median and the 99th
percentile of the steps before; and eager torch's median, all in the same process. Compare the load with the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from compiled_sampler import Sampler
from compiled_sampler.modes import RULES
from tools.bench.cases import CASES, NUM_DRAFTS
from tools.measuring import environment, write_json

_MOST_SECONDS = 300.0
_EAGER_STEPS = 10
_MOST_PAUSE = 0.05


def run(options: argparse.Namespace) -> None:
    """Measure every case in two processes, print and store."""
    rules = RULES if options.verify else ()
    names = [*options.cases, *(f"{rule}, {name}" for rule in rules for name in options.cases)]
    cells: list[dict[str, Any]] = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            for cache in ("cold", "warm"):
                asked = [name, str(options.rows[0]), str(options.vocab[0]), options.device]
                command = [sys.executable, "-m", "tools.bench.start", *asked]
                ran = subprocess.run(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, check=True)
                cells.append({"case": name, "cache": cache, **json.loads(ran.stdout.splitlines()[-1])})
                if options.json:
                    write_json(options.json, {**environment(options.device), "table": cells})
    Console(width=140).print(table_of(cells))


def table_of(cells: Sequence[dict[str, Any]]) -> Table:
    """What was measured, a line for each process."""
    table = Table(*("case", "cache", "first ms", "ready s", "median ms", "p99 ms", "eager ms", "worker CPU s", "load"))
    for cell in cells:
        table.add_row(*(f"{each:.1f}" if isinstance(each, float) else str(each) for each in cell.values()))
    return table


def measured(name: str, rows: int, vocab_size: int, device: str) -> dict[str, float]:
    """One process's numbers, in the order of the table."""
    step, eager = (step_of(name, rows, vocab_size, device, backend) for backend in ("auto", "eager"))
    taken = [seconds_of(step[0], device)]
    first = begin = time.perf_counter()
    while step[1].statistics().lowering.queued_stages and time.perf_counter() - begin < _MOST_SECONDS:
        time.sleep(min(taken[-1], _MOST_PAUSE))  # for the model, which leaves cores to the compile process
        taken.append(seconds_of(step[0], device))
    ready = time.perf_counter() - first
    of_eager = [seconds_of(eager[0], device) for _ in range(_EAGER_STEPS)]
    return {
        "first_ms": 1e3 * taken[0],
        "ready_s": ready,
        "median_ms": 1e3 * statistics.median(taken),
        "p99_ms": 1e3 * sorted(taken)[int(0.99 * len(taken))],
        "eager_ms": 1e3 * statistics.median(of_eager),
        "worker_cpu_s": worker_cpu_seconds(),
        "load": os.getloadavg()[0],
    }


def step_of(name: str, rows: int, vocab_size: int, device: str, backend: str) -> tuple[Callable[[], object], Any]:
    """A step of a case, with drafts where it begins with a rule, and its sampler."""
    rule, case = name.split(", ", 1) if name.split(", ")[0] in RULES else ("", name)
    drafts = NUM_DRAFTS if rule else 0
    sampler = Sampler(vocab_size, rows, device, backend=backend)
    slots = [sampler.add_request(CASES[case].params) for _ in range(rows)]
    chance = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(rows * (1 + drafts), vocab_size, generator=chance).to(device)
    positions = torch.arange(rows, device=device)
    if not rule:
        plan = sampler.plan(slots)
        return lambda: sampler.sample(plan, logits, positions), sampler
    plan = sampler.plan(slots, num_drafts=[drafts] * rows)
    ids = torch.randint(vocab_size, (rows, drafts), generator=chance).to(device)
    return lambda: sampler.verify(plan, logits, ids, positions, rule), sampler


def seconds_of(step: Callable[[], object], device: str) -> float:
    """Of one step, waited for."""
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def worker_cpu_seconds() -> float:
    """CPU time of all compile processes, which have ended by then, and of the compilers that they started."""
    from compiled_sampler.lowering.compile_queue import QUEUE

    QUEUE.end()
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    case, rows, vocab, where = sys.argv[1:]
    print(json.dumps(measured(case, int(rows), int(vocab), where)))
