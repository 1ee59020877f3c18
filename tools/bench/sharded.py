"""What does a draw take whose vocabulary is split over ranks, and what would moving the logits take?

    torchrun --nproc-per-node 2 -m tools.bench --sharded [--cases ...] [--rows 1 8 32 128 512] [--seconds 150]
                                                         [--slow-wire] [--json FILE]
    torchrun --nproc-per-node 2 -m tools.bench --sharded --mismatches 100000 [--cases ...] [--json FILE]
    torchrun --nproc-per-node 2 -m tools.bench --sharded --leave

A cell is the time of one call inside a replayed graph of many calls, each on logits of its own, collectives included:
the slowest rank's median. Beside the library stand: with ``--slow-wire``, in cases that search, the library with
``slow_wire``, as "counts"; an all-gather of the logits and the sampler of whole rows on every rank; an all-to-all, that
sampler for B / T rows, and an all-gather of tokens; a gather to rank 0, the sampler there, and a broadcast of tokens.
All must draw the same tokens, or the run ends. On the CPU it is gloo, eager torch and the clock.

Compilers are asked for all at once. Cases that search take them longest: they are measured together, before the others
if the first of ``--cases`` is one, else after them; rows in the order of ``WORTH``. After ``--seconds`` no further cell
begins; each cell is stored when it is there. ``--mismatches`` counts the rows, of other logits in each replay, in which
a rank differs from whole rows. ``--leave`` lets the last rank exit before a step; the others must end with torch's
error within the timeout, 20 s.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from compiled_sampler import Plan, Sampler, VocabularyShard
from tools.bench.cases import CASES
from tools.measuring import ROTATED_BYTES, environment, logits_like, write_json

SHARDED_CASES = ("greedy", "no_filter", "min_p .05", "k 50 + p .9", "k 1000", "p .9")
WAYS = ("ours", "counts", "all-gather", "all-to-all", "rank 0")
WORTH = (32, 128, 8, 512, 1)
"""Rows in the order in which they are measured."""
COUNTED = {
    "greedy": (1, 16, 1),
    "no_filter": (1, 16, 1),
    "min_p .05": (2, 20, 2),
    "k 50 + p .9": (1, 528, 1),
    "k 1000, counts": (11, 988, 11),
    "p .9, counts": (20, 1956, 20),
}
"""Collectives, bytes a row and rank, and reads of the shard, as docs/sharded.md counts them."""
_WIRE_BYTES_PER_US, _READ_BYTES_PER_US = 280e3, 4e6
"""Of NVLink, by all-to-alls and all-gathers of logits on four H200s, and of an H200's memory."""
_WARM, _REPEATS, _FEWEST_CALLS, _MOST_CALLS = 3, 15, 8, 48
_LEAVE_TIMEOUT_S, _PROGRESS_S = 20, 5
_BEGAN = time.perf_counter()
_TITLE = "us a call; in brackets as a multiple of ours"


class Ranks:
    """This rank's part of a vocabulary, a sampler of it and one of whole rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device, int(os.environ["LOCAL_RANK"]) if options.device == "cuda" else None)
        self.vocab_size, self.most, self.slots = options.vocab[0], max(options.rows), list[int]()
        count, rank = dist.get_world_size(), dist.get_rank()
        ends = [self.vocab_size * n // count for n in range(count + 1)]
        self.shard = VocabularyShard(ends[rank], ends[rank + 1])
        self.compiles = options.device == "cuda" and not options.leave  # within its timeout
        backend = "compiled" if self.compiles else "eager"
        sizes = {*options.rows, *(-(-rows // count) for rows in options.rows)}
        form = self.vocab_size, self.most, self.device
        self.split = Sampler(*form, backend=backend, shard=self.shard, buckets=sizes)
        self.whole = Sampler(*form, backend=backend, buckets=sizes)
        self.counted: Sampler | None = None
        if options.slow_wire:
            counting = VocabularyShard(ends[rank], ends[rank + 1], slow_wire=True)
            self.counted = Sampler(*form, backend=backend, shard=counting, buckets=sizes)

    def say(self, message: str) -> None:
        """Print a line with the seconds since the start, on rank 0."""
        if self.shard.rank == 0:
            print(f"[{time.perf_counter() - _BEGAN:4.0f} s] {message}", flush=True)

    def searches(self, case: str) -> bool:
        """Whether draws of a case search for a threshold."""
        return self.whole.mode_for(CASES[case].params).searches

    def samplers_of(self, cases: Sequence[str]) -> dict[str, Sampler]:
        """Those that draw in cases that search, or in cases that do not, by name."""
        samplers = {"whole rows": self.whole, "shards": self.split}
        return {**samplers, "counts": self.counted} if self.counted and self.searches(cases[0]) else samplers

    def compile(self, cases: Sequence[str], *, waits: bool) -> None:
        """Compile what the cases need, with the processes of all ranks at once; without ``waits`` ask for it alone."""
        modes = sorted({self.whole.mode_for(CASES[case].params).name for case in cases})
        for name, sampler in self.samplers_of(cases).items() if self.compiles else ():
            last = -math.inf

            def progress(done: int, total: int, label: str, name: str = name) -> None:
                nonlocal last
                if done == total or time.perf_counter() - last > _PROGRESS_S:
                    last = time.perf_counter()
                    self.say(f"{name}, {' '.join(modes)}: {done} of {total}, {label}")

            sampler.warmup(progress if waits else None, modes, wait=waits)
        dist.barrier()

    def plans(self, case: str, rows: int) -> tuple[Plan, Plan | None, Plan, Plan]:
        """Of the sharded samplers, of the one of whole rows, and of this one for this rank's part of the rows."""
        samplers = [sampler for sampler in (self.split, self.whole, self.counted) if sampler]
        for slot in range(self.most - self.whole.num_free_slots):
            for sampler in samplers:
                sampler.remove_request(slot)
        params = [replace(CASES[case].params, seed=row) for row in range(rows)]
        self.slots, *others = ([sampler.add_request(each) for each in params] for sampler in samplers)
        assert others == [self.slots] * len(others)
        split, whole, *counted = (sampler.plan(self.slots) for sampler in samplers)
        return (
            split,
            counted[0] if counted else None,
            whole,
            self.whole.plan(self.slots[slice(*self.shard.own_part(rows))]),
        )

    def ways(self, case: str, rows: int) -> dict[str, Callable[[Tensor], Tensor]]:
        """From the columns of this rank to tokens, in each way."""
        plan, counted_plan, whole_plan, part_plan = self.plans(case, rows)
        positions = torch.arange(rows, device=self.device) + 7
        part, size, shard = slice(*self.shard.own_part(rows)), self.vocab_size, self.shard
        tokens = torch.zeros(rows, dtype=torch.int64, device=self.device)

        def ours(columns: Tensor) -> Tensor:
            return self.split.sample(plan, columns, positions).token_ids

        def counts(columns: Tensor) -> Tensor:
            assert self.counted is not None
            assert counted_plan is not None
            return self.counted.sample(counted_plan, columns, positions).token_ids

        def all_gather(columns: Tensor) -> Tensor:
            return self.whole.sample(whole_plan, shard.whole_rows(columns, size), positions).token_ids

        def all_to_all(columns: Tensor) -> Tensor:
            drawn = self.whole.sample(part_plan, shard.exchanged_rows(columns, size), positions[part]).token_ids
            return shard.told_rows(drawn, rows)

        def rank_0(columns: Tensor) -> Tensor:
            widths = shard.widths(size)
            parts = [columns.new_empty(rows, width) for width in widths] if shard.rank == 0 else None
            dist.gather(columns.contiguous(), parts, 0)
            if parts is not None:
                tokens.copy_(self.whole.sample(whole_plan, torch.cat(parts, 1), positions).token_ids)
            dist.broadcast(tokens, 0)
            return tokens.clone()

        ways = dict(zip(WAYS, (ours, counts, all_gather, all_to_all, rank_0), strict=True))
        equal = len(set(shard.widths(size))) == 1
        if rows < shard.count:
            del ways["all-to-all"]
        if not (self.counted and plan.mode.searches):
            del ways["counts"]
        return ways if equal else {name: way for name, way in ways.items() if name != "rank 0"}


def timed(way: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> tuple[float, list[Tensor]]:
    """Median microseconds of a call on this rank, and its tokens; every rank makes the same calls."""
    device = inputs[0].device
    calls = [inputs[number % len(inputs)] for number in range(_FEWEST_CALLS)] if len(inputs) < _FEWEST_CALLS else inputs
    if device.type == "cpu":
        times = []
        for _ in range(3):
            dist.barrier()
            began = time.perf_counter()
            tokens = [way(each) for each in inputs]
            times.append((time.perf_counter() - began) * 1e6 / len(inputs))
        return min(times), tokens
    for each in inputs[:_WARM]:
        way(each)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = [way(each) for each in calls]
    times = []
    for number in range(_WARM + _REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= _WARM:
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    found = [each.clone() for each in tokens[: len(inputs)]]
    torch.cuda.synchronize()
    return statistics.median(times), found


def measured(ranks: Ranks, case: str, rows: int) -> dict[str, float]:
    """Microseconds by way, of the slowest rank."""
    shard, size = ranks.shard, ranks.vocab_size
    row_bytes = 4 * max(shard.widths(size)) * rows
    count = max(2, min(_MOST_CALLS, -(-ROTATED_BYTES // row_bytes))) if ranks.device.type == "cuda" else 2
    distribution = CASES[case].distribution
    inputs = [
        shard.own(logits_like(distribution, rows, size, ranks.device, torch.float32, seed), size).contiguous()
        for seed in range(count)
    ]
    cells, first = {}, None
    for name, way in ranks.ways(case, rows).items():
        us, tokens = timed(way, inputs)
        cells[name] = round(max(shard.told(us)), 2)
        first = tokens if first is None else first
        if any(not torch.equal(*pair) for pair in zip(first, tokens, strict=True)):
            raise SystemExit(f"{case}, {rows} rows: {name} draws other tokens on rank {shard.rank}")
    return cells


def mismatches(ranks: Ranks, case: str, rows: int, count: int, name: str) -> tuple[int, int]:
    """Rows in which a replayed draw of this rank differs from that of whole rows, and all rows; of all ranks."""
    ours, positions = ranks.ways(case, rows)[name], torch.arange(rows, device=ranks.device) + 7
    whole_plan = ranks.whole.plan(ranks.slots)
    columns = torch.zeros(rows, ranks.shard.width(ranks.vocab_size), device=ranks.device)
    tokens, graph = ours(columns), None
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = ours(columns)
    wrong = torch.zeros((), dtype=torch.int64, device=ranks.device)
    steps = -(-count // rows)
    for step in range(steps):
        distribution = ("peaked", "normal", "ties", "flat")[step % 4]
        logits = logits_like(distribution, rows, ranks.vocab_size, ranks.device, torch.float32, 1000 + step)
        columns.copy_(ranks.shard.own(logits, ranks.vocab_size))
        if graph is None:
            tokens = ours(columns)
        else:
            graph.replay()
        wrong += (tokens != ranks.whole.sample(whole_plan, logits, positions).token_ids).sum()
    return sum(ranks.shard.told(int(wrong))), steps * rows


def run(options: argparse.Namespace) -> None:
    """Measure, print and store on rank 0."""
    if "RANK" not in os.environ:
        raise SystemExit("--sharded must be run by torchrun: torchrun --nproc-per-node 2 -m tools.bench --sharded")
    options.cases = [case for case in options.cases if case in SHARDED_CASES]
    is_cuda, device_id = options.device == "cuda", None
    if is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device_id = torch.device("cuda", torch.cuda.current_device())
    seconds = _LEAVE_TIMEOUT_S if options.leave else 1800  # ranks wait for each other's compilers
    dist.init_process_group("nccl" if is_cuda else "gloo", timeout=timedelta(seconds=seconds), device_id=device_id)
    ranks, console = Ranks(options), Console(width=120)
    if options.leave:
        _leave(ranks)
        return
    ranks.say(f"{ranks.shard.count} ranks are there")
    facts = {**environment(options.device), "ranks": str(ranks.shard.count), "vocab": str(ranks.vocab_size)}
    cells: list[dict[str, Any]] = []
    for cell in cells_of(ranks, options):
        cells.append(cell)
        ranks.say(str(cell))
        if ranks.shard.rank == 0 and options.json:
            write_json(options.json, {**facts, "table": cells})
    cells.sort(key=lambda cell: (options.cases.index(cell["case"]), cell["rows"]))
    if ranks.shard.rank == 0:
        console.print(table_of(cells), model_table(8, ranks.vocab_size))
    gc.collect()  # closing a communicator of NCCL waits for graphs that hold its collectives, and for the other ranks
    dist.barrier()
    dist.destroy_process_group()


def cells_of(ranks: Ranks, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each cell when it is measured: of the cases that search as the first case does, then of the others."""
    firsts = dict.fromkeys(map(ranks.searches, options.cases))
    groups = [[case for case in options.cases if ranks.searches(case) == searches] for searches in firsts]
    for cases in groups:
        ranks.compile(cases, waits=False)
    for cases in groups:
        ranks.compile(cases, waits=True)
        every = itertools.product(options.rows[-1:] if options.mismatches else by_worth(options.rows), cases)
        for rows, case in every:
            if options.seconds and max(ranks.shard.told(time.perf_counter() - _BEGAN)) > options.seconds:
                ranks.say(f"no time for {case}, {rows} rows")
            elif options.mismatches:
                for name in WAYS[: 1 + (ranks.counted is not None and ranks.searches(case))]:
                    wrong, count = mismatches(ranks, case, rows, -(-options.mismatches // len(options.cases)), name)
                    yield {"case": case, "rows": rows, "way": name, "mismatches": wrong, "of": count}
            else:
                yield {"case": case, "rows": rows, **measured(ranks, case, rows)}


def by_worth(rows: Sequence[int]) -> list[int]:
    """The numbers of rows in the order of ``WORTH``, then the others."""
    return [count for count in WORTH if count in rows] + [count for count in rows if count not in WORTH]


def table_of(cells: list[dict[str, Any]]) -> Table:
    """The cells, with what each other way takes as a multiple of ours."""
    found = {name for cell in cells for name in cell}
    names = [name for name in ("way", "mismatches", "of", *WAYS) if name in found]
    table = Table("case", "rows", *names, title=None if "of" in names else _TITLE)
    for cell in cells:
        shown = [str(cell.get(name, "")) for name in names]
        if "ours" in cell:
            shown[1:] = [
                f"{cell[name]} ({cell[name] / cell['ours']:.2f})" if name in cell else "" for name in names[1:]
            ]
        table.add_row(cell["case"], str(cell["rows"]), *shown)
    return table


def modelled_us(collectives: int, wire_bytes: float, read_bytes: float, ranks: int) -> float:
    """What latencies, bytes that a rank sends or receives, and reads take one after the other; no instructions."""
    latency_us = 9.3 + 3.7 * math.log2(ranks / 2)  # 9.3 us measured with 2 ranks, 13 with 4
    return collectives * latency_us + wire_bytes / _WIRE_BYTES_PER_US + read_bytes / _READ_BYTES_PER_US


def model_table(ranks: int, vocab_size: int, rows: Sequence[int] = (8, 32, 128, 512)) -> Table:
    """``modelled_us`` of each case, and of ways that move logits and read them once, without what they draw by."""
    shard_bytes = 4 * vocab_size / ranks
    ways = {name: (count, sent, reads * shard_bytes) for name, (count, sent, reads) in COUNTED.items()}
    ways["all-to-all"] = 2, shard_bytes * (ranks - 1) / ranks, shard_bytes
    ways["all-gather"] = 1, shard_bytes * (ranks - 1), ranks * shard_bytes
    table = Table("way", *(f"{count} rows" for count in rows), title=f"us of a model of {ranks} ranks")
    for name, (count, sent, read) in ways.items():
        table.add_row(name, *(f"{modelled_us(count, n * sent, n * read, ranks):.0f}" for n in rows))
    return table


def _leave(ranks: Ranks) -> None:
    """Draw once; then the last rank exits, and the others draw again."""
    ours = ranks.ways("no_filter", 1)["ours"]
    columns = torch.zeros(1, ranks.shard.width(ranks.vocab_size), device=ranks.device)
    ours(columns).tolist()
    if ranks.shard.rank == ranks.shard.count - 1:
        os._exit(0)
    began = time.perf_counter()
    try:
        ours(columns).tolist()
    except RuntimeError as error:
        print(f"rank {ranks.shard.rank}: {type(error).__name__} after {time.perf_counter() - began:.1f} s: {error}")
        os._exit(0)  # a communicator that lost a rank is not closed in order
    raise SystemExit("a draw without the last rank returned")
