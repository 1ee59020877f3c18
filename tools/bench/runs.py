"""Runs of the benchmark: a grid of cases, rows, vocabularies and dtypes, measured cell by cell."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compiled_sampler import SampleOutputs, Sampler
from tools.bench.baselines import Baseline, baselines_of
from tools.bench.batches import (
    Batch,
    check,
    eager,
    eager_calls,
    plan_of,
    sampling_batch,
    served,
    tune,
    verification_batch,
)
from tools.bench.cases import CASES, TARGET_DTYPE, TARGET_VOCAB_SIZE, VERIFY_CASES, Case
from tools.bench.cells import Cell
from tools.bench.floors import Rates, chain_of, floor, rates, work_of
from tools.measuring import graph_time_us, num_inputs, queued_time_us, time_calls, use_streams

Report = Callable[[Cell], None]
_REPEATED = 32  # calls of a graph that reads one batch again and again, as replays of a sampler do


@dataclass
class Bench:
    """Measures cells with one sampler for a vocabulary and a dtype, which all cases share as an engine's do."""

    device: torch.device
    vocab_size: int
    dtype: torch.dtype
    rates: Rates
    with_baselines: bool = False
    with_replays: bool = False
    backend: str = "compiled"
    cells: list[Cell] = field(default_factory=list)
    """All that were measured, also with other vocabularies and dtypes."""

    def __post_init__(self) -> None:
        """Hold a request for every case."""
        cases = [*CASES.values(), *VERIFY_CASES.values()]
        self.sampler = Sampler(self.vocab_size, len(cases), self.device, self.dtype, self.backend)
        self._slots = {case.name: self.sampler.add_request(case.params) for case in cases}

    def measure(self, cases: Sequence[Case], distribution: str, rows: int) -> Iterator[Cell]:
        """Cells of cases that read the same batch."""
        first = cases[0]
        row_bytes = self.vocab_size * self.dtype.itemsize * (first.num_drafts + 1) * rows
        count = num_inputs(row_bytes, self.device) * rows
        batch = self._batch(first, distribution, count)
        for case in cases:
            self.cells.append(self._cell(case, distribution, rows, batch))
            yield self.cells[-1]
        del batch
        release(self.device)

    def _batch(self, case: Case, distribution: str, count: int) -> Batch:
        if not case.rule:
            return sampling_batch(distribution, count, self.vocab_size, self.device, self.dtype)
        return verification_batch(distribution, count, case.num_drafts, self.vocab_size, self.device, self.dtype)

    def _cell(self, case: Case, distribution: str, rows: int, batch: Batch) -> Cell:
        calls, slot = batch.calls(rows), self._slots[case.name]
        plan = plan_of(self.sampler, slot, case, rows)
        if self.device.type == "cuda":
            tune(self.sampler, slot, case, rows)
        us, results = time_calls(lambda call: served(self.sampler, plan, case, call), calls, self.device)
        check(case, plan.mode, batch, results)
        chain = chain_of(lambda run: eager(case, plan.mode, calls[0], run))
        bound = floor(work_of(case, rows, self.vocab_size, self.dtype.itemsize, chain), self.rates)
        name, mode = str(self.dtype).removeprefix("torch."), plan.mode
        target = self._target(case, distribution, rows, name, batch)
        slow = None
        if self.device.type == "cpu":
            slow = time_calls(eager_calls(case, mode, self.device), calls, self.device)[0]
        others = baseline_times(case, calls, self.device) if self.with_baselines else {}
        replay = us + self._over_kernels_us(case, calls[0]) if self.with_replays and case.rule is None else None
        shape = (rows, case.num_drafts, self.vocab_size, name, distribution)
        numbers = us, bound.us, bound.kind, chain.num_kernels, target, slow, replay
        return Cell(case.name, mode.name, *shape, *numbers, others)

    def _over_kernels_us(self, case: Case, batch: Batch) -> float:
        """What the GPU takes for a step that the sampler replays itself, beyond its kernels on the same logits."""
        rows, device = batch.num_requests, self.device
        sampler = Sampler(self.vocab_size, rows, device, self.dtype, buckets=[rows])
        plan = plan_of(sampler, sampler.add_request(case.params), case, rows)
        tokens, status = (torch.zeros(rows, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
        out = SampleOutputs(tokens, status)
        sampler.bind(logits=batch.logits, positions=batch.positions, out=out)
        sampler.warmup(modes=[plan.mode.name])
        replayed = queued_time_us(lambda: sampler.sample(plan, batch.logits, batch.positions, out))
        if not sampler.statistics().replays:
            raise RuntimeError(f"{case.name} must be replayed by the sampler, got {sampler.statistics()}")
        known = plan_of(self.sampler, self._slots[case.name], case, rows)
        kernels, _ = graph_time_us(lambda: [served(self.sampler, known, case, batch) for _ in range(_REPEATED)])
        return replayed - kernels / _REPEATED

    def _target(self, case: Case, distribution: str, rows: int, dtype: str, batch: Batch) -> float | None:
        if self.device.type != "cuda":
            return None
        if case.sampler_multiple is not None:
            return case.sampler_multiple * self._sampler_us(case, rows, batch)
        return target_of(case, (rows, case.num_drafts, self.vocab_size, dtype, distribution), self.cells)

    def _sampler_us(self, case: Case, requests: int, batch: Batch) -> float:
        """The time of sampling as many rows with the same parameters."""
        rows = Batch(batch.logits, torch.arange(batch.logits.shape[0], device=self.device))
        plain, slot = Case(case.name, case.params, case.passes), self._slots[case.name]
        count = requests * (case.num_drafts + 1)
        tune(self.sampler, slot, plain, count)
        plan, calls = plan_of(self.sampler, slot, plain, count), rows.calls(count)
        return time_calls(lambda call: served(self.sampler, plan, plain, call), calls, self.device)[0]


def target_of(case: Case, shape: tuple[int, int, int, str, str], measured: Sequence[Cell]) -> float | None:
    """What a cell should take; None where nothing was set.

    Args:
        case: with its targets, for its own kind of logits.
        shape: rows, K, V, dtype and kind of logits.
        measured: cells before this one; 16-bit logits should not take longer than float32 logits did.
    """
    rows, num_drafts, vocab_size, dtype, distribution = shape
    if dtype != TARGET_DTYPE:
        twin = (case.name, rows, num_drafts, vocab_size, TARGET_DTYPE, distribution)
        return next((cell.us for cell in measured if cell.key == twin), None)
    same = vocab_size == TARGET_VOCAB_SIZE and distribution == case.distribution
    return case.targets.get(rows) if same else None


def baseline_times(case: Case, calls: Sequence[Batch], device: torch.device) -> dict[str, float | str]:
    """Microseconds of each baseline, or why it has none."""
    times: dict[str, float | str] = {}
    if case.drafts == "one_hot":
        calls = [call._replace(draft_probs=None) for call in calls]
    for name, function in baselines_of(case).items():
        times[name] = function if isinstance(function, str) else baseline_time(function, calls, device)
        release(device)
    return times


def baseline_time(function: Baseline, calls: Sequence[Batch], device: torch.device) -> float | str:
    """Microseconds of a baseline, or how it failed: what others raise must not end the run."""
    try:
        us, results = time_calls(function, calls, device)
        check_ids(torch.cat(results), calls[0].logits.shape[1])
    except Exception as error:
        return f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
    return us


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Raise unless ids of tokens ``[...]`` are below V; -1 stands for no token.

    Raises:
        ValueError: they are not.
    """
    if int(ids.min()) < -1 or int(ids.max()) >= vocab_size or int(ids.max()) < 0:
        raise ValueError(f"token ids must be in [-1, {vocab_size}), got {int(ids.min())} to {int(ids.max())}")


def release(device: torch.device) -> None:
    """Give back memory of graphs and batches that nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def grid(options: argparse.Namespace) -> Iterator[tuple[list[Case], str, int]]:
    """Cases that read the same batch, its kind of logits, and its rows."""
    cases = [CASES[name] for name in options.cases]
    verified = list(VERIFY_CASES.values()) if options.verify else []
    for found, counts in ((cases, options.rows), (verified, options.requests)):
        kinds = options.distribution or dict.fromkeys(case.distribution for case in found)
        for distribution in kinds:
            same = [case for case in found if options.distribution or case.distribution == distribution]
            for rows in counts if same else ():
                yield same, distribution, rows


def run(options: argparse.Namespace, report: Report) -> list[Cell]:
    """Measure the grid for every vocabulary and dtype."""
    device = torch.device(options.device)
    cells: list[Cell] = []
    limits = rates(device)
    if options.streams:
        use_streams(options.streams, device)
    for vocab_size in options.vocab:
        for dtype in options.dtype:
            given = options.baselines, options.replays, options.backend, cells
            bench = Bench(device, vocab_size, getattr(torch, dtype), limits, *given)
            for cases, distribution, rows in grid(options):
                for cell in bench.measure(cases, distribution, rows):
                    report(cell)
    return cells
