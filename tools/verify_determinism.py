"""Are the tokens of a million hard rows the same bits on every path?

    python -m tools.verify_determinism [--rows 1000000] [--control] [--json FILE]

Every row is drawn by eager torch on the CPU and again on each other path, there in another order, among padding rows,
and in whatever variant the path has: eager CPU in the mode that covers everything, compiled CPU and, with CUDA, eager,
compiled, replayed and captured in an outer graph. Rows mix modes, parameters, ties, scores one ulp apart, denormals,
infinities and NaN. The exit status is 1 when a token or a status differs. With ``--control`` one bit of one seed is
changed on the reference side, and the exit status is 1 unless every path then differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from compiled_sampler import SampleOutputs, Sampler, SamplingParams
from compiled_sampler.batch import NoiseKeys
from compiled_sampler.modes import Mode, uncovered
from compiled_sampler.noise import TARGET, gumbel, noise_keys
from tools.measurement import environment, write_json

SHARES = {(127, torch.float32): 0.6, (257, torch.bfloat16): 0.385, (4099, torch.float16): 0.015}
"""Vocabulary and dtype, and its share of the rows."""
NUM_REQUESTS = 240
REPLAYED_ROWS = (256, 1, 100, 255, 7)
"""Rows of the batches that are replayed, in turn; the variants hold 1 and 256."""

_MOST_ROWS, _MOST_LOGITS = 4096, 1 << 24
_TEMPERATURES = (1e-5, 0.1, 0.7, 1.0, math.log2(math.e), 3.0, 1e30)
_TOP_P = (1e-9, 0.1, 0.25, 0.5, 0.9, 0.999, 1.0 - 2.0**-53, 1.0)
_MIN_P = (0.0, 0.0, 1e-12, 0.05, 0.5, 1.0)
_SEEDS = (0, 1, -1, -(2**63), 2**63, 2**64 - 1)
_POSITIONS = (0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1)


class Batch(NamedTuple):
    """Rows to draw, on the CPU."""

    logits: Tensor
    """``[R, V]``."""
    slots: Tensor
    """int64 ``[R]``."""
    positions: Tensor
    """int64 ``[R]``."""


Path = Callable[[Batch, str], SampleOutputs]


def mixed_requests(vocab_size: int, count: int, seed: int) -> list[SamplingParams]:
    """Requests that need each mode in turn; equal arguments give equal requests."""
    source = random.Random(seed)
    narrow, wide = (1, 2, 5, 50, 64), (0, 65, vocab_size // 2, vocab_size - 1, vocab_size, vocab_size + 1)
    filtered = {"temperature": _TEMPERATURES, "min_p": _MIN_P}
    families: tuple[dict[str, tuple[float, ...]], ...] = (
        {"temperature": (0.0,)},
        {"temperature": _TEMPERATURES},
        filtered,
        filtered | {"top_p": _TOP_P, "top_k": narrow},
        filtered | {"top_p": _TOP_P, "top_k": wide},
    )
    seeds = (*_SEEDS, *(source.getrandbits(64) for _ in range(count - len(_SEEDS))))
    picked = ({name: source.choice(values) for name, values in families[i % 5].items()} for i in range(count))
    return [SamplingParams(seed=seed, **options) for seed, options in zip(seeds, picked, strict=False)]


def mixed_batch(requests: list[SamplingParams], mode: Mode, rows: int, dtype: torch.dtype, seed: int) -> Batch:
    """Rows of every kind for requests that the mode covers.

    Args:
        requests: by slot.
        mode: gives V, and covers at least one of them.
        rows: R.
        dtype: of the logits.
        seed: equal arguments give equal rows.
    """
    generator = torch.Generator().manual_seed(seed)
    covered = torch.tensor([slot for slot, each in enumerate(requests) if uncovered(mode, each) is None])
    slots = covered[torch.randint(len(covered), (rows,), generator=generator)]
    positions = torch.randint(2**31 - 1, (rows,), generator=generator)
    special = torch.tensor(_POSITIONS)
    positions[: len(special)] = special[:rows]
    logits = hard_rows([requests[slot] for slot in slots], positions, mode.vocab_size, generator)
    return Batch(logits.to(dtype), slots, positions)


def hard_rows(requests: list[SamplingParams], positions: Tensor, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Rows of every kind in a random order: float32 ``[R, V]``.

    Args:
        requests: of each row.
        positions: int64 ``[R]``.
        vocab_size: V.
        generator: of the rows.
    """
    rows = len(requests)
    noise = torch.randn(rows, vocab_size, generator=generator)
    logits = torch.cat([kind(part) for kind, part in zip(KINDS, noise.tensor_split(len(KINDS)), strict=True)])
    logits = logits[torch.randperm(rows, generator=generator)]
    near = torch.rand(rows, generator=generator) < 1.0 / len(KINDS)
    logits[near] = near_ties([requests[row] for row in near.nonzero()[:, 0].tolist()], positions[near], vocab_size)
    return logits


def near_ties(requests: list[SamplingParams], positions: Tensor, vocab_size: int) -> Tensor:
    """Float32 logits ``[R, V]`` that bring all scores of a row's race within a few ulps of 40: ``x = (40 - G) / c``."""
    seeds = torch.tensor([((each.seed or 0) + 2**63) % 2**64 - 2**63 for each in requests], dtype=torch.int64)
    keys = NoiseKeys(*(key[:, None] for key in noise_keys(seeds, positions, TARGET)))
    scale = torch.tensor([math.log2(math.e) / (each.temperature or 1.0) for each in requests])
    return (40.0 - gumbel(keys, torch.arange(vocab_size, dtype=torch.int32))) / scale[:, None]


def _denormal(x: Tensor) -> Tensor:
    return (x.abs() * 1e5).to(torch.int32).view(torch.float32).copysign(x)


KINDS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: 4.0 * x,
    lambda x: 3.0 * x * x * x,
    lambda x: 0.01 * x,
    lambda x: x.bfloat16().float(),
    lambda x: (2.0 * x).round(),
    lambda x: torch.zeros_like(x),
    lambda x: torch.zeros_like(x).copysign(x),
    _denormal,
    lambda x: 1e38 * x,
    lambda x: torch.where(x > 1.5, x, -math.inf),
    lambda x: torch.full_like(x, -math.inf),
    lambda x: torch.where(x.abs() > 2.0, torch.full_like(x, math.nan).copysign(x), 4.0 * x),
    lambda x: torch.where(x.abs() > 2.5, x * math.inf, x),
    lambda x: torch.where(x == x.amax(-1, keepdim=True), math.inf, x),
)
"""Rows ``[R, V]`` made of a standard normal sample."""


def arranged(batch: Batch, padding: int, seed: int) -> tuple[Batch, Tensor]:
    """The rows in another order with padding rows between them, and where each went.

    Args:
        batch: ``[R, V]``.
        padding: rows to add; their slots are -1, and their logits and positions belong to other rows.
        seed: of the order.
    """
    rows = len(batch.slots)
    order = torch.randperm(rows + padding, generator=torch.Generator().manual_seed(seed))
    slots = torch.cat([batch.slots, torch.full((padding,), -1)])
    source = order % rows
    return Batch(batch.logits[source], slots[order], batch.positions[source]), order.argsort()


def num_mismatches(wanted: SampleOutputs, found: SampleOutputs, places: Tensor) -> int:
    """Rows whose token or status differs, and padding rows that are not -1.

    Args:
        wanted: ``[R]``, in the first order.
        found: ``[R + padding]``, arranged.
        places: int64 ``[R + padding]``, where each row went.
    """
    wrong = torch.zeros(len(places), dtype=torch.bool)
    for want, have in zip(wanted, found, strict=True):
        padding = torch.full((len(places) - len(want),), -1, dtype=want.dtype)
        wrong |= torch.cat([want, padding]) != have[places]
    return int(wrong.sum())


def direct(sampler: Sampler, forced: str | None = None) -> Path:
    """One call for the whole batch; a forced mode replaces the one asked for."""

    def run(batch: Batch, mode: str) -> SampleOutputs:
        plan = sampler.plan(batch.slots.tolist(), forced or mode)
        out = sampler.sample(plan, batch.logits.to(sampler.device), batch.positions.to(sampler.device))
        return SampleOutputs(*(each.cpu() for each in out))

    return run


def replayed(sampler: Sampler) -> Path:
    """Many small batches of several sizes."""
    small = direct(sampler)

    def run(batch: Batch, mode: str) -> SampleOutputs:
        results, start = [], 0
        while start < len(batch.slots):
            stop = start + REPLAYED_ROWS[len(results) % len(REPLAYED_ROWS)]
            results.append(small(Batch(*(each[start:stop] for each in batch)), mode))
            start = stop
        return SampleOutputs(*(torch.cat(parts) for parts in zip(*results, strict=True)))

    return run


def captured(sampler: Sampler) -> Path:
    """The engine's own graph, one for each mode and number of rows; every input is copied to where it reads."""
    graphs: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, Batch, SampleOutputs]] = {}

    def capture(batch: Batch, mode: str) -> tuple[torch.cuda.CUDAGraph, Batch, SampleOutputs]:
        inputs = Batch(*(each.to(sampler.device, copy=True) for each in batch))
        plan = dataclasses.replace(sampler.plan(batch.slots.tolist(), mode), slot_ids=inputs.slots)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sampler.sample(plan, inputs.logits, inputs.positions)
        return graph, inputs, out

    def run(batch: Batch, mode: str) -> SampleOutputs:
        key = (mode, len(batch.slots))
        graph, inputs, out = graphs[key] = graphs.get(key) or capture(batch, mode)
        for source, target in zip(batch, inputs, strict=True):
            target.copy_(source)
        graph.replay()
        return SampleOutputs(*(each.cpu() for each in out))

    return run


def paths_of(vocab_size: int, dtype: torch.dtype, requests: list[SamplingParams]) -> dict[str, Path]:
    """Every path of this machine, by name, for samplers that hold the requests."""

    def holding(device: str, backend: str) -> Sampler:
        sampler = Sampler(vocab_size, len(requests), device, dtype, backend, buckets=(1, 256))
        for request in requests:
            sampler.add_request(request)
        return sampler

    eager = holding("cpu", "eager")
    paths = {"eager CPU, mode full": direct(eager, "full"), "compiled CPU": direct(holding("cpu", "compiled"))}
    if torch.cuda.is_available():
        graph = holding("cuda", "graph")
        graph.warmup()
        paths |= {
            "eager CUDA": direct(holding("cuda", "eager")),
            "compiled CUDA": direct(graph),  # batches larger than every bucket are called directly
            "replayed": replayed(graph),
            "captured in an outer graph": captured(graph),
        }
    return paths


class Count(NamedTuple):
    """What was compared on one path."""

    path: str
    rows: int
    mismatches: int
    seconds: float


def compare(rows: int, vocab_size: int, dtype: torch.dtype, control: bool) -> Iterator[Count]:
    """One count a batch and path; batches take the modes in turn."""
    requests = mixed_requests(vocab_size, NUM_REQUESTS, seed=vocab_size)
    changed = dataclasses.replace(requests[1], seed=(requests[1].seed or 0) ^ 1)
    reference = Sampler(vocab_size, NUM_REQUESTS, "cpu", dtype, "eager")
    for slot, request in enumerate(requests):
        reference.add_request(changed if control and slot == 1 else request)
    paths = paths_of(vocab_size, dtype, requests)
    size = min(_MOST_ROWS, max(1, _MOST_LOGITS // vocab_size), -(-rows // len(reference.modes)))
    for i, start in enumerate(range(0, rows, size)):
        mode = reference.modes[i % len(reference.modes)]
        batch = mixed_batch(requests, mode, min(size, rows - start), dtype, seed=i)
        wanted = direct(reference)(batch, mode.name)
        other, places = arranged(batch, padding=17, seed=i)
        for name, path in paths.items():
            began = time.perf_counter()
            wrong = num_mismatches(wanted, path(other, mode.name), places)
            yield Count(name, len(batch.slots), wrong, time.perf_counter() - began)


def main() -> int:
    """Compare, print, store; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--control", action="store_true", help="change one bit of one seed: every path must differ")
    parser.add_argument("--json", help="store the counts in this file")
    arguments = parser.parse_args()
    totals: dict[str, Count] = {}
    for (vocab_size, dtype), share in SHARES.items():
        for each in compare(math.ceil(arguments.rows * share), vocab_size, dtype, arguments.control):
            before = totals.get(each.path, Count(each.path, 0, 0, 0.0))
            totals[each.path] = Count(each.path, *(a + b for a, b in zip(before[1:], each[1:], strict=True)))
    table = Table("path", "rows", "mismatches", "seconds", title="against eager torch on the CPU")
    for total in totals.values():
        table.add_row(total.path, f"{total.rows:,}", f"{total.mismatches:,}", f"{total.seconds:.1f}")
    Console().print(table)
    if arguments.json:
        counts = [total._asdict() for total in totals.values()]
        write_json(arguments.json, {"environment": environment(), "control": arguments.control, "paths": counts})
    return int(any((total.mismatches > 0) != arguments.control for total in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
