"""Do verified drafts leave the stream alone under ``match``, and is every verification the same bits on every path?

    python -m tools.verify_streams [--requests 100000] [--processes 1] [--control] [--json FILE]

Requests have 0 to 8 drafts from one of four drafters: the target itself, random ids (some no token), the argmax, and a
drafter with other logits that races on the target's noise. Under ``match`` the tokens of eager torch on the CPU are
compared with those of the plain sampler, row after row. Under every rule each path is compared with eager torch on the
CPU: without CUDA, eager torch in the mode that covers everything, and compiled stages; with CUDA, eager torch, replayed
variants of modes that cover the one asked for, and an outer graph. Rows are those of ``tools.verify_determinism``. The
exit status is 1 when anything differs. With ``--control`` the drafts differ on the reference side, and the exit status
is 1 unless every path then does.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams, VerifyOutputs
from compiled_sampler.modes import Mode, Verification
from tools.hard_rows import hard_rows, mixed_batch, mixed_requests
from tools.measurement import reported
from tools.replays import replaying

V, WIDTH, NUM_REQUESTS, BATCH = 127, 8, 240, 256
RULES = (
    Verification("match", WIDTH),
    Verification("rejection", WIDTH, "probabilities"),
    Verification("block", WIDTH, "probabilities"),
)
SHARE_OF_MATCH = 10
"""Batches under ``match`` for each batch under another rule, whose stages take longer."""
STREAM = "plain sampler, row after row"


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


class Reference(NamedTuple):
    """A batch and what eager torch on the CPU makes of it."""

    mode: str
    work: Job
    wanted: dict[Verification, VerifyOutputs]
    """By the rules that take this batch."""
    plain: VerifyOutputs
    """The ``stream``, with the status that is wanted."""


Path = Callable[[Job, str, Verification], VerifyOutputs]


def job(sampler: Sampler, requests: list[SamplingParams], mode: Mode, seed: int) -> Job:
    """A batch for requests that the mode covers; equal arguments give equal batches.

    Args:
        sampler: eager, holds the requests in slots 0, 1, ...
        requests: by slot.
        mode: gives V.
        seed: of everything.
    """
    generator = torch.Generator().manual_seed(seed)
    _, slots, positions = mixed_batch(requests, mode, BATCH, torch.float32, seed)
    positions = positions.clamp(max=2**63 - 1 - WIDTH)
    num_drafts = torch.randint(WIDTH + 1, (BATCH,), generator=generator)
    request = torch.arange(BATCH).repeat_interleave(num_drafts + 1)
    offset = torch.arange(len(request)) - (num_drafts + 1).cumsum(0)[request] + num_drafts[request] + 1
    of_row, where = slots[request], positions[request] + offset
    logits = hard_rows([requests[slot] for slot in of_row.tolist()], where, V, generator)
    other = logits + 0.7 * torch.randn(logits.shape, generator=generator)

    def sampled(x: Tensor) -> Tensor:
        return sampler.sample(sampler.plan(of_row.tolist()), x, where).token_ids

    random_ids = torch.randint(-2, V + 2, (len(request),), generator=generator)
    drafters = torch.stack([sampled(logits), random_ids, logits.nan_to_num(-torch.inf).argmax(-1), sampled(other)])
    drafts = torch.full((BATCH, WIDTH), -1)
    judged = offset < num_drafts[request]
    chosen = torch.randint(len(drafters), (BATCH,), generator=generator)[request]
    drafts[request[judged], offset[judged]] = drafters[chosen, torch.arange(len(request))][judged]
    proposals = torch.softmax(other.nan_to_num(0.0, 50.0, -50.0).clamp(-50.0, 50.0), -1)[judged]
    return Job(logits, slots, positions, num_drafts, drafts, proposals)


def stream(sampler: Sampler, work: Job) -> VerifyOutputs:
    """What ``match`` must give, from the plain sampler's tokens of every row; the status is left at 0."""
    counts = (work.num_drafts + 1).tolist()
    slots = [slot for slot, count in zip(work.slots.tolist(), counts, strict=True) for _ in range(count)]
    where = torch.cat([at + torch.arange(count) for at, count in zip(work.positions, counts, strict=True)])
    tokens = sampler.sample(sampler.plan(slots), work.logits, where).token_ids.split(counts)
    out = torch.full((len(counts), WIDTH + 1), -1)
    emitted, matching = [], []
    for n, (own, drafts) in enumerate(zip(tokens, work.drafts.tolist(), strict=True)):
        hits = [a == b != -1 for a, b in zip(own[:-1].tolist(), drafts, strict=False)]
        length = (hits.index(False) if False in hits else len(hits)) + 1
        out[n, :length] = own[:length]
        emitted.append(length)
        matching.append(sum(hits))
    lengths = torch.tensor(emitted)
    return VerifyOutputs(out, lengths, lengths - 1, torch.tensor(matching), torch.zeros(len(counts), dtype=torch.int32))


def direct(sampler: Sampler, forced: str | None = None) -> Path:
    """One call for a batch; a forced mode replaces the one asked for."""

    def run(work: Job, mode: str, how: Verification) -> VerifyOutputs:
        tensors = Job(*(each.to(sampler.device) for each in work))
        plan = sampler.plan(work.slots.tolist(), forced or mode, work.num_drafts.tolist())
        q = tensors.proposals if how.drafts == "probabilities" else None
        out = sampler.verify(plan, tensors.logits, tensors.drafts, tensors.positions, how.rule, draft_probs=q)
        return VerifyOutputs(*(each.cpu() for each in out))

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
        return VerifyOutputs(*(each.cpu() for each in out))

    return run


def paths_of(requests: list[SamplingParams]) -> dict[str, Path]:
    """Every path of this machine, by name, for samplers that hold the requests."""

    def holding(device: str, backend: str) -> Sampler:
        sampler = Sampler(V, len(requests), device, torch.float32, backend, buckets=(BATCH,), verifications=RULES)
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


def num_mismatches(wanted: VerifyOutputs, found: VerifyOutputs) -> int:
    """Requests of which any field differs."""
    wrong = torch.zeros(len(wanted.status), dtype=torch.bool)
    for want, have in zip(wanted, found, strict=True):
        wrong |= (want != have).view(len(wrong), -1).any(-1)
    return int(wrong.sum())


@functools.cache
def _eager() -> tuple[Sampler, list[SamplingParams]]:
    """A sampler of this process, and the requests that it holds."""
    requests = mixed_requests(V, NUM_REQUESTS, seed=V)
    sampler = Sampler(V, NUM_REQUESTS, backend="eager")
    for request in requests:
        sampler.add_request(request)
    return sampler, requests


def reference(number: int, control: bool) -> Reference:
    """A batch by its number; batches take rules and modes in turn."""
    sampler, requests = _eager()
    mode = sampler.modes[number % len(sampler.modes)]
    work = job(sampler, requests, mode, seed=number)
    every = (number + number // len(sampler.modes)) % SHARE_OF_MATCH == SHARE_OF_MATCH - 1
    changed = work._replace(drafts=work.drafts ^ 1) if control else work
    wanted = {how: direct(sampler)(changed, mode.name, how) for how in (RULES if every else RULES[:1])}
    return Reference(mode.name, work, wanted, stream(sampler, work)._replace(status=wanted[RULES[0]].status))


def _pickled(number: int, control: bool) -> bytes:
    return pickle.dumps(reference(number, control))  # by value: shared memory takes a file for each tensor


def references(count: int, control: bool, processes: int) -> Iterable[Reference]:
    """Batches of at least so many requests, made in this process or in several others."""
    numbers = range(-(-count // BATCH))
    if processes == 1:
        yield from (reference(number, control) for number in numbers)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for made in pool.map(functools.partial(_pickled, control=control), numbers):
            yield pickle.loads(made)


class Count(NamedTuple):
    """What was compared by one rule on one path."""

    rule: str
    path: str
    requests: int
    mismatches: int


def compare(count: int, control: bool, processes: int = 1) -> Iterator[Count]:
    """One count a batch, rule and path."""
    paths = paths_of(_eager()[1])
    for mode, work, wanted, plain in references(count, control, processes):
        yield Count("match", STREAM, BATCH, num_mismatches(wanted[RULES[0]], plain))
        for how, want in wanted.items():
            for name, path in paths.items():
                yield Count(how.rule, name, BATCH, num_mismatches(want, path(work, mode, how)))


def main() -> int:
    """Compare, print, store; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=1, help="that make batches and what eager torch makes of them")
    parser.add_argument("--control", action="store_true", help="change drafts: every path must differ")
    parser.add_argument("--json", help="store the counts in this file, after each batch")
    arguments = parser.parse_args()
    if min(arguments.requests, arguments.processes) < 1:
        parser.error("--requests and --processes must be at least 1")
    counts = compare(arguments.requests, arguments.control, arguments.processes)
    return reported(counts, arguments.control, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
