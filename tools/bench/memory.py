"""How much memory does a step hold at its peak, besides its logits and its results?

A cell runs one step in one mode, once to compile it and once measured. On CUDA the peak is that of torch's allocator
(``max_memory_allocated``), over what was allocated before. On the CPU it is that of torch's allocator too, summed up
from what its profiler records of each allocation; what numpy allocates there is not seen. "computed" is what the
schedule allows for (``compiled_sampler/pipeline/schedule.py``): no step should be above it but for
verification, whose last stages hold some numbers more for each block of a row.

All that is measured compiled is precompiled first, by several processes. Steps with edits and with logprobs are those
of a sampler whose requests all have them. On CUDA a sampler is warmed up besides, with bound logits and one bucket, for
what its graphs hold.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from compiled_sampler import Logprobs, Sampler
from compiled_sampler.batch import SampleInputs, VerifyInputs
from compiled_sampler.core.stage import Run
from compiled_sampler.engine.requests.slots import SlotState
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import Mode, mode_table, verifying
from compiled_sampler.pipeline.chunks import eagerly
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.schedule import chunk_rows, is_gpu, row_bytes
from compiled_sampler.pipeline.verify import verify_step
from tools.bench.cases import NUM_DRAFTS
from tools.kernels.steps import REQUESTS
from tools.measuring import environment, write_json

ROWS = {"cuda": [128, 512, 4096], "cpu": [8, 128]}
VERIFICATIONS = (
    ("match", "one_hot"),
    ("rejection", "one_hot"),
    ("rejection", "probabilities"),
    ("block", "one_hot"),
    ("block", "logits"),
)
"""Rules, each with what its drafts were drawn from."""

EDITED, WITH_LOGPROBS = "sample, penalties, bias, mask", "sample, logprobs"
EDITS, LOGPROBS = ("token_bitmask", "penalties", "logit_bias"), Logprobs(top=5, rank=True)
_PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "logit_bias": {7: 1.0, 11: -1.0}}
_HISTORY = 64

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class MemoryCell:
    """One measurement, in bytes."""

    step: str
    """"sample", "probs", the rule and the drafts of a verification, or what a sampler's graphs hold."""
    mode: str
    rows: int
    """R, rows of logits; with drafts a request has ``NUM_DRAFTS + 1`` of them."""
    vocab: int
    scratch_bytes: int
    """At the peak, besides logits, parameters and results."""
    computed_bytes: int | None
    """What the schedule allows for; None where it does not say."""


def run(options: Any) -> None:
    """Measure, print, store; ``options`` are those of ``tools.bench``."""
    facts = environment(options.device) | {"backend": options.backend, "dtype": options.dtype[0]}
    console, cells = Console(width=120, highlight=False), list[MemoryCell]()
    for cell in _cells(options):
        cells.append(cell)
        console.print(f"{cell.step}, {cell.mode}, {cell.rows} rows: {cell.scratch_bytes / _MIB:.1f} MiB")
        if options.json:
            write_json(options.json, {**facts, "table": [dataclasses.asdict(each) for each in cells]})
    console.print(table_of(cells))


def _cells(options: Any) -> Iterator[MemoryCell]:
    """All cells, those first that compile least."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype[0])
    for vocab_size in options.vocab:
        stages: Run = eagerly
        whole = torch.randn(max(options.rows), vocab_size, device=device, dtype=dtype)
        if options.backend == "compiled":
            stages = CompiledStages()
            stages.compiles_at_calls = True  # of what another layout needs
            precompile(whole, options.rows, stages, verifies=options.verify)
        for rows in options.rows:
            yield from measured(whole[:rows], stages, verifies=options.verify)
        yield from measured_additions(whole, options.rows, options.backend)
        if device.type == "cuda" and options.backend == "compiled":
            for rows in options.rows:
                yield from held_by_graphs(whole[:rows])


def precompile(logits: Tensor, rows: Sequence[int], stages: CompiledStages, *, verifies: bool) -> None:
    """Compile all that ``measured`` runs for the first rows of these logits, in parallel."""
    modes = mode_table(logits.shape[1], "top_k")
    with stages.precompiling(logits.device):
        for count, mode in itertools.product(rows, modes):
            for _, _, work in steps(mode, logits[:count], stages, verifies=verifies):
                work()


def measured(logits: Tensor, run: Run, *, verifies: bool) -> Iterator[MemoryCell]:
    """The cells of every mode for these logits ``[R, V]``, with ``verifies`` also of every verification."""
    rows, vocab_size = logits.shape
    for mode in mode_table(vocab_size, "top_k"):
        fixed = {"triton": is_gpu(logits.device), "fused": run.fuses}
        for step, given, work in steps(mode, logits, run, verifies=verifies):
            work()
            computed = step_bytes(given, rows, **fixed)
            yield MemoryCell(step, mode.name, rows, vocab_size, scratch_bytes(work, logits.device), computed)


def measured_additions(logits: Tensor, rows: Sequence[int], backend: str) -> Iterator[MemoryCell]:
    """The cells of every mode with edits, and with logprobs, for the first rows of these logits."""
    most, vocab_size = len(logits), logits.shape[1]
    sampler = Sampler(vocab_size, most, logits.device, logits.dtype, backend, buckets=rows, history_len=_HISTORY,
                      captured_edits=[EDITS], captured_logprobs=[LOGPROBS])  # fmt: skip
    sampler.warmup()
    masks = torch.full((most, -(-vocab_size // 32)), -1, dtype=torch.int32, device=logits.device)
    for count, mode in itertools.product(rows, sampler.modes):
        for name, penalties, given in (
            (EDITED, _PENALTIES, {"token_bitmask": masks[:count]}),
            (WITH_LOGPROBS, {}, {"logprobs": LOGPROBS}),
        ):
            params = dataclasses.replace(REQUESTS[mode.name], **penalties)
            slots = [sampler.add_request(params) for _ in range(count)]
            plan, positions = sampler.plan(slots, mode=mode.name), torch.zeros(count, dtype=torch.int64)
            work = partial(sampler.sample, plan, logits[:count], positions.to(logits.device), **given)
            work()
            yield MemoryCell(name, mode.name, count, vocab_size, scratch_bytes(work, logits.device), None)
            for slot in slots:
                sampler.remove_request(slot)


def steps(mode: Mode, logits: Tensor, run: Run, *, verifies: bool) -> Iterator[tuple[str, Mode, Callable[[], Any]]]:
    """The steps of a mode on these logits, each with its name and the mode that it runs in."""
    device = logits.device
    state = SlotState(1, (mode,), device)
    state.add(REQUESTS[mode.name])
    state.upload()

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    rows = len(logits)
    inputs = SampleInputs(logits, zeros(rows), zeros(rows), state.table)
    yield "sample", mode, partial(sample_step, mode, inputs, run)
    yield "probs", mode, partial(probability_step, mode, inputs, run)
    count = rows // (NUM_DRAFTS + 1)
    for rule, drafts in VERIFICATIONS if verifies and count else ():
        proposals = None if drafts == "one_hot" else logits[: count * NUM_DRAFTS]
        if drafts == "probabilities":
            proposals = logits[: count * NUM_DRAFTS].float().softmax(-1)
        requests = zeros(count), zeros(count), zeros(count) + NUM_DRAFTS, zeros(count, NUM_DRAFTS)
        drafted = VerifyInputs(logits[: count * (NUM_DRAFTS + 1)], *requests, proposals, state.table)
        given = verifying(mode, rule, drafts)
        yield f"{rule}, {drafts}", given, partial(verify_step, given, drafted, run)


def step_bytes(mode: Mode, rows: int, *, triton: bool, fused: bool) -> int:
    """Bytes of scratch of a step of so many rows, at most: of one chunk; arguments as ``row_bytes``."""
    most = chunk_rows(mode, triton=triton, fused=fused)
    return min(rows, most) * row_bytes(mode, triton=triton, fused=fused)


def scratch_bytes(work: Callable[[], Any], device: torch.device) -> int:
    """Bytes that some work holds at its peak, besides its results and what was held before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        results = work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before - result_bytes(results)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        results = work()
    held = peak = 0
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak - result_bytes(results)


def result_bytes(results: Any) -> int:
    """Bytes of the tensors that a step returned."""
    return sum(each.nbytes for each in tree_leaves(results) if isinstance(each, Tensor))


def held_by_graphs(logits: Tensor) -> Iterator[MemoryCell]:
    """What the graphs of a sampler hold for a bucket of these rows, all modes captured, with bound logits."""
    rows, vocab_size = logits.shape
    sampler = Sampler(vocab_size, rows, logits.device, logits.dtype, buckets=[rows])
    sampler.bind_logits(logits)
    sampler.warmup()
    found = sampler.statistics()
    held = {"the pool of graphs": found.pool_bytes, "static buffers": found.buffer_bytes}
    for name, nbytes in held.items():
        yield MemoryCell(name, "all modes", rows, vocab_size, nbytes, None)


def table_of(cells: Sequence[MemoryCell]) -> Table:
    """A line for each step and mode."""
    table = Table(title="MiB at the peak of a step, besides its logits and its results")
    for name in ("step", "mode"):
        table.add_column(name)
    for name in ("rows", "V", "measured", "computed"):
        table.add_column(name, justify="right")
    for cell in cells:
        computed = "" if cell.computed_bytes is None else f"{cell.computed_bytes / _MIB:.1f}"
        sizes = str(cell.rows), str(cell.vocab), f"{cell.scratch_bytes / _MIB:.1f}", computed
        table.add_row(cell.step, cell.mode, *sizes)
    return table
