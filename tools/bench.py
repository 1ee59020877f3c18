"""How long does a sampling step take on this machine, and how far is it from its floor?

    python -m tools.bench [--modes ...] [--rows 1 32 128] [--vocab 151936] [--dtypes float32] [--json FILE]

A cell is the median time of one call inside a replayed CUDA graph. The graph holds many calls, each on logits of its
own that together exceed the L2 cache several times. Before a time is printed every row of every call is compared with
eager torch. The floor is one read of the logits at 4.3 TB/s plus one graph node. Without CUDA the clock is used.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.modes import row_class
from tools.measurement import environment, write_json
from tools.workloads import DISTRIBUTIONS, logits_like

CASES = {
    "greedy": SamplingParams(temperature=0.0, seed=1),
    "no_filter": SamplingParams(temperature=0.8, seed=2),
    "min_p .05": SamplingParams(temperature=0.8, min_p=0.05, seed=3),
    "k 50 + p .9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=4),
    "k 50 + p .9 + min_p .05": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.05, seed=5),
    "p .9": SamplingParams(temperature=0.8, top_p=0.9, seed=6),
    "p .5": SamplingParams(temperature=0.8, top_p=0.5, seed=7),
    "k 1000": SamplingParams(temperature=0.8, top_k=1000, seed=8),
    "p .99": SamplingParams(temperature=0.8, top_p=0.99, seed=9),
}
READ_BYTES_PER_US = 4.3e6
NODE_US = 1.0
_ROTATED_BYTES = 160 << 20  # more than three times the 50 MB of L2
_MOST_CALLS = 200


class Cell(NamedTuple):
    """One measurement."""

    case: str
    mode: str
    rows: int
    vocab_size: int
    dtype: str
    distribution: str
    median_us: float
    floor_us: float


def measure(case: str, rows: int, vocab_size: int, dtype: torch.dtype, distribution: str, device: str) -> Cell:
    """Time one cell, after comparing every row with eager torch.

    Raises:
        AssertionError: a row differs from eager torch.
    """
    samplers = [Sampler(vocab_size, 2, device, dtype, backend) for backend in ("compiled", "eager")]
    plans = [each.plan([each.add_request(CASES[case])] * rows) for each in samplers]
    size = rows * vocab_size * dtype.itemsize
    calls = max(4, min(_MOST_CALLS, _ROTATED_BYTES // size)) if device == "cuda" else 2
    inputs = [logits_like(distribution, rows, vocab_size, device, dtype, seed) for seed in range(calls)]
    positions = [torch.arange(rows, device=device) + rows * i for i in range(calls)]
    _tune(samplers[0], case, rows)
    for logits, position in zip(inputs, positions, strict=True):
        ours, eager = (s.sample(p, logits, position) for s, p in zip(samplers, plans, strict=True))
        wrong = int((ours.token_ids != eager.token_ids).sum() + (ours.status != eager.status).sum())
        assert not wrong, f"{case}, {rows} rows: {wrong} differ from eager torch"

    def step() -> None:
        for logits, position in zip(inputs, positions, strict=True):
            samplers[0].sample(plans[0], logits, position)

    timer = graph_time_us if device == "cuda" else clock_time_us
    floor = size / READ_BYTES_PER_US + NODE_US
    name = str(dtype).removeprefix("torch.")
    return Cell(case, plans[0].mode.name, rows, vocab_size, name, distribution, timer(step) / calls, floor)


def _tune(sampler: Sampler, case: str, rows: int) -> None:
    """Compile as ``Sampler.warmup`` does, for the batch that stands for ``rows``, but for one mode alone."""
    count = row_class(rows, sampler.device)
    plan = sampler.plan([sampler.add_request(CASES[case])] * count)
    logits = torch.zeros(count, sampler.vocab_size, dtype=sampler.logits_dtype, device=sampler.device)
    sampler.sample(plan, logits, torch.zeros(count, dtype=torch.int64, device=sampler.device))


def graph_time_us(step: Callable[[], Any], repeats: int = 15) -> float:
    """Median microseconds of a replay of ``step`` captured in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def clock_time_us(step: Callable[[], Any], repeats: int = 5) -> float:
    """Median microseconds of a call by the clock."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[1:])


def table_of(cells: list[Cell]) -> Table:
    """A row a case, a column a number of rows; each entry is the time and its ratio to the floor."""
    rows = sorted({cell.rows for cell in cells})
    table = Table(
        "case", "mode", "V", "dtype", "logits", *(f"B={count}" for count in rows), title="us a call (x floor)"
    )
    groups: dict[tuple[Any, ...], dict[int, Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.case, cell.mode, cell.vocab_size, cell.dtype, cell.distribution), {})[cell.rows] = cell
    for group, found in groups.items():
        entries = [
            f"{found[n].median_us:.1f} ({found[n].median_us / found[n].floor_us:.1f})" if n in found else ""
            for n in rows
        ]
        table.add_row(*(str(item) for item in group), *entries)
    return table


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--vocab", nargs="+", type=int, default=[151_936])
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--distributions", nargs="+", default=["peaked"], choices=DISTRIBUTIONS)
    parser.add_argument("--json", help="store the cells in this file")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cells = [
        measure(case, rows, vocab_size, getattr(torch, dtype), distribution, device)
        for vocab_size in arguments.vocab
        for dtype in arguments.dtypes
        for distribution in arguments.distributions
        for case in arguments.cases
        for rows in arguments.rows
    ]
    Console(width=150).print(table_of(cells))
    if arguments.json:
        write_json(arguments.json, {"environment": environment(), "cells": [cell._asdict() for cell in cells]})


if __name__ == "__main__":
    main()
