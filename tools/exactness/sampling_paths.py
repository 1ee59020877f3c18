"""Every path that a batch can be sampled on: eager, compiled, replayed, and captured in an outer graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import torch

from compiled_sampler import SampleOutputs, Sampler, SamplingParams
from compiled_sampler.batch import tensors_of
from tools.exactness.hard_rows import Batch
from tools.exactness.replays import replaying

BUCKETS = (1, 256)

REPLAYED_ROWS = (256, 1, 100, 255, 7)
"""Rows of the variants that are replayed, and of the batches that they serve, in turn.

Another variant is as large as the largest batch: a warm-up then prepares what the outer graph captures.
"""

Path = Callable[[Batch, str], SampleOutputs]


def direct(sampler: Sampler, forced: str | None = None) -> Path:
    """One call for the whole batch; a forced mode replaces the one asked for."""

    def run(batch: Batch, mode: str) -> SampleOutputs:
        plan = sampler.plan(batch.slots.tolist(), forced or mode)
        out = sampler.sample(plan, batch.logits.to(sampler.device), batch.positions.to(sampler.device))
        return SampleOutputs(*(each.cpu() for each in tensors_of(out)))

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
        return SampleOutputs(*(torch.cat(parts) for parts in zip(*map(tensors_of, results), strict=True)))

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
        return SampleOutputs(*(each.cpu() for each in tensors_of(out)))

    return run


def paths_of(
    device: str, vocab_size: int, dtype: torch.dtype, requests: list[SamplingParams], rows: int, modes: Collection[str]
) -> dict[str, Path]:
    """Every path of a device, by name, for samplers that hold the requests and batches of up to so many rows.

    Args:
        device: "cpu" or "cuda".
        vocab_size: V.
        dtype: of the logits.
        requests: by slot.
        rows: of the largest batch.
        modes: names of the modes that batches come in.
    """

    def holding(backend: str) -> Sampler:
        sampler = Sampler(vocab_size, len(requests), device, dtype, backend, buckets=sorted({*BUCKETS, rows}))
        for request in requests:
            sampler.add_request(request)
        return sampler

    prepared = holding("graph" if device == "cuda" else "compiled")
    prepared.warmup(modes=modes)  # compiles in parallel, and each later sampler takes the kernels from the disk
    if device == "cpu":
        return {"eager CPU, mode full": direct(holding("eager"), "full"), "compiled CPU": direct(prepared)}
    return {
        "eager CUDA": direct(holding("eager")),
        "compiled CUDA": direct(holding("compiled")),
        "replayed": replaying(prepared, replayed(prepared)),
        "captured in an outer graph": captured(prepared),
    }
