"""Every path that drafts can be verified on: eager, compiled, replayed, and captured in an outer graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams, VerifyOutputs
from compiled_sampler.batch import tensors_of
from compiled_sampler.modes import Verification
from tools.exactness.replays import replaying

V, WIDTH, NUM_REQUESTS, BATCH = 127, 8, 240, 256

RULES = (
    Verification("match", WIDTH),
    Verification("rejection", WIDTH, "probabilities"),
    Verification("block", WIDTH, "probabilities"),
)


class Job(NamedTuple):
    """Requests with drafts, on the CPU."""

    logits: Tensor
    """``[R, V]``."""
    slots: Tensor
    """int64 ``[N]``."""
    positions: Tensor
    """int64 ``[N]``."""
    num_drafts: Tensor
    """int64 ``[N]``."""
    drafts: Tensor
    """int64 ``[N, WIDTH]``."""
    proposals: Tensor
    """float32 ``[D, V]``."""


Path = Callable[[Job, str, Verification], VerifyOutputs]


def direct(sampler: Sampler, forced: str | None = None) -> Path:
    """One call for a batch; a forced mode replaces the one asked for."""

    def run(work: Job, mode: str, how: Verification) -> VerifyOutputs:
        tensors = Job(*(each.to(sampler.device) for each in work))
        plan = sampler.plan(work.slots.tolist(), forced or mode, work.num_drafts.tolist())
        q = tensors.proposals if how.drafts == "probabilities" else None
        out = sampler.verify(plan, tensors.logits, tensors.drafts, tensors.positions, how.rule, draft_probs=q)
        return VerifyOutputs(*(each.cpu() for each in tensors_of(out)))

    return run


def captured(sampler: Sampler) -> Path:
    """The engine's own graph, one for each rule, for any request and as wide as can be; inputs are copied into it."""
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, Job, VerifyOutputs]] = {}

    def capture(how: Verification) -> tuple[torch.cuda.CUDAGraph, Job, VerifyOutputs]:
        plan = sampler.plan([-1] * BATCH, "full", [WIDTH] * BATCH)
        inputs = Job(
            torch.zeros(plan.num_rows, V, device="cuda"),
            plan.slot_ids.clone(),
            torch.zeros_like(plan.slot_ids),
            torch.zeros_like(plan.slot_ids),
            torch.full((BATCH, WIDTH), -1, device="cuda"),
            torch.zeros(plan.num_proposals, V, device="cuda"),
        )
        plan = dataclasses.replace(plan, slot_ids=inputs.slots, draft_counts=inputs.num_drafts)
        q = inputs.proposals if how.drafts == "probabilities" else None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sampler.verify(plan, inputs.logits, inputs.drafts, inputs.positions, how.rule, draft_probs=q)
        return graph, inputs, out

    def run(work: Job, mode: str, how: Verification) -> VerifyOutputs:
        graph, inputs, out = graphs[how.rule] = graphs.get(how.rule) or capture(how)
        for source, target in zip(work, inputs, strict=True):
            target[: len(source)].copy_(source)
        graph.replay()
        return VerifyOutputs(*(each.cpu() for each in tensors_of(out)))

    return run


def paths_of(requests: list[SamplingParams], rules: Sequence[Verification]) -> dict[str, Path]:
    """Every path of this machine, by name, for samplers that hold the requests and verify by the rules."""

    def holding(device: str, backend: str) -> Sampler:
        sampler = Sampler(V, len(requests), device, torch.float32, backend, buckets=(BATCH,), verifications=rules)
        for request in requests:
            sampler.add_request(request)
        return sampler

    if not torch.cuda.is_available():
        return {
            "eager CPU, mode full": direct(holding("cpu", "eager"), "full"),
            "compiled CPU": direct(holding("cpu", "compiled")),
        }
    graph = holding("cuda", "graph")
    graph.warmup(modes=["greedy", "full"])
    return {
        "eager CUDA": direct(holding("cuda", "eager")),
        "replayed": replaying(graph, direct(graph)),
        "captured in an outer graph, mode full": captured(graph),
    }
