"""Samplers that tests share, because compiling costs seconds, and batches of theirs."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler import Plan, SampleOutputs, Sampler, SamplingParams, Verification, VerifyOutputs
from compiled_sampler.batch import tensors_of
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.lowering.inductor.compilation import Compiled
from compiled_sampler.lowering.stage_code import StageCode
from compiled_sampler.modes import RULES
from tests.cases.hard_rows import Batch
from tests.graph_cache.recorded import RecordingBackend

Outputs = SampleOutputs | VerifyOutputs
Results = TypeVar("Results")
V, SHARED_SLOTS = 129, 128
"""Of samplers whose sizes do not matter: what is compiled for one is on disk for others, and V for the self-check."""

REQUESTS = {
    "greedy": SamplingParams(temperature=0.0, seed=1),
    "no_filter": SamplingParams(temperature=0.9, seed=2),
    "min_p": SamplingParams(temperature=0.8, min_p=0.05, seed=3),
    "top_k_top_p[64]": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=4),
    "top_k": SamplingParams(temperature=1.2, top_k=90, seed=6),
    "full": SamplingParams(temperature=1.5, top_p=0.97, min_p=1e-4, seed=5),
}
"""A request that each mode is the cheapest for, where V exceeds the capacity."""


@functools.cache
def shared_sampler(
    vocab_size: int, dtype: torch.dtype = torch.float32, backend: str = "compiled", device: str = "cpu"
) -> Sampler:
    """One sampler for all tests of the process; use it with ``held`` so that its slots come back."""
    return Sampler(vocab_size, SHARED_SLOTS, device, dtype, backend)


def sampler_with(params: Iterable[SamplingParams], vocab_size: int = V, slots: int = 8, **options: Any) -> Sampler:
    """A sampler with the requests in its first slots, eager unless options say otherwise."""
    made = Sampler(vocab_size, slots, **{"backend": "eager", **options})
    for each in params:
        made.add_request(each)
    return made


def planned(
    *params: SamplingParams, num_drafts: Sequence[int] | None = None, vocab_size: int = V, **options: Any
) -> tuple[Sampler, Plan]:
    made = sampler_with(params, vocab_size, **options)
    return made, made.plan(range(len(params)), num_drafts=num_drafts)


def normal_rows(count: int, vocab_size: int = V, seed: int = 0) -> Tensor:
    """Logits of which some tokens are likely, the same ones for equal arguments."""
    return 3.0 * torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed))


def replay_recordings(sampler: Sampler) -> RecordingBackend:
    """The backend with which an eager sampler records and replays from now on, as a "graph" does on a device."""
    sampler._runner.backend = "graph"
    sampler._runner._cache._backend = backend = RecordingBackend()
    return backend


def recorded(sampler: Sampler, modes: Sequence[str] | None = ("full",)) -> Sampler:
    """The eager sampler, which has recorded the steps of these modes and replays them from now on."""
    replay_recordings(sampler)
    sampler.warmup(modes=modes)
    return sampler


@contextlib.contextmanager
def only_replays(sampler: Sampler, count: int) -> Iterator[None]:
    """Within, as many steps are replayed, and none is captured or runs without a graph."""
    before = sampler.statistics()
    yield
    after = sampler.statistics()
    assert (after.captures, after.direct_runs) == (before.captures, before.direct_runs)
    assert after.replays - before.replays == count


def verifying_sampler(backend: str, vocab_size: int, params: Sequence[SamplingParams], width: int) -> Sampler:
    """Holds a request in each slot, and verifies up to ``width`` drafts by each rule; "graph" replays recordings."""
    ways = [Verification(rule, width) for rule in RULES]
    made_with, buckets = "eager" if backend == "graph" else backend, [2, len(params)]
    made = Sampler(vocab_size, len(params), backend=made_with, buckets=buckets, verifications=ways)
    return holding(made, backend, params)


def holding(
    made: Sampler, backend: str, params: Iterable[SamplingParams], modes: Sequence[str] | None = ("full",)
) -> Sampler:
    """The sampler with these requests; for "graph", the modes are recorded before, for ``replay_recordings``."""
    if backend == "graph":
        recorded(made, modes)
    for each in params:
        made.add_request(each)
    return made


@contextlib.contextmanager
def nothing_compiles() -> Iterator[None]:
    """Tracing, compiling, loading what was compiled, and stages in eager torch that are not compiled yet are errors."""
    refused = AssertionError("a stage was compiled after the warm-up")
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        mock.patch.object(torch, "compile", side_effect=refused),
        mock.patch.object(CompiledStages, "_compile", side_effect=refused),
        mock.patch.object(CompiledStages, "_eager_until_ready", side_effect=refused),
    ):
        yield


@contextlib.contextmanager
def stages_stay_eager(wrong: Mapping[Any, Any] | None = None) -> Iterator[None]:
    """Within, what a sampler compiles are the stages as they are, but for some, which do otherwise: no Inductor."""

    def made(code: StageCode, *_: Any) -> Compiled:
        return Compiled(functools.partial((wrong or {}).get(code.stage, code.stage), **code.static))

    with mock.patch.object(StageCode, "found_or_compiled", made), mock.patch.object(StageCode, "compiled", made):
        yield


@contextlib.contextmanager
def held(sampler: Sampler, params: Sequence[SamplingParams]) -> Iterator[list[int]]:
    """The slots of the requests, which are removed afterwards."""
    slots = [sampler.add_request(each) for each in params]
    try:
        yield slots
    finally:
        for slot in slots:
            sampler.remove_request(slot)


def drawn(
    sampler: Sampler,
    params: Sequence[SamplingParams],
    logits: Tensor,
    positions: Tensor | None = None,
    mode: str | None = None,
) -> SampleOutputs:
    """One row for each request, at positions 0, 1, ... unless given; the results are on the CPU."""
    where = torch.arange(len(params)) if positions is None else positions
    with held(sampler, params) as slots:
        return on_cpu(sampler.sample(sampler.plan(slots, mode), logits.to(sampler.device), where.to(sampler.device)))


def on_cpu(out: SampleOutputs) -> SampleOutputs:
    return SampleOutputs(*(each.cpu() for each in tensors_of(out)))


def wanted_of(reference: Sampler, slots: Sequence[int], logits: Tensor, positions: Tensor) -> SampleOutputs:
    """What a sampler on the CPU draws for tensors of any device."""
    return reference.sample(reference.plan(slots), logits.cpu(), positions.cpu())


def captured(step: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    """An engine's own graph around a step, and the results that each replay writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


class EngineGraph:
    """An engine's own graph around ``sample``; logits, slots and positions are what it reads at each replay."""

    def __init__(self, sampler: Sampler, mode: str, rows: int) -> None:
        """Captured with padding in every row."""
        self.logits = torch.zeros(rows, sampler.vocab_size, dtype=sampler.logits_dtype, device=sampler.device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=sampler.device)
        plan = sampler.plan([-1] * rows, mode)
        self.slots = plan.slot_ids.clone()
        plan = dataclasses.replace(plan, slot_ids=self.slots)
        self.graph, self.out = captured(lambda: sampler.sample(plan, self.logits, self.positions))

    def __call__(self, batch: Batch) -> SampleOutputs:
        for target, source in zip((self.logits, self.slots, self.positions), batch, strict=True):
            target.copy_(source)
        self.graph.replay()
        return on_cpu(self.out)


def same(left: Outputs, right: Outputs) -> bool:
    """Whether both are outputs of one kind with equal dtypes, shapes and values, on any device."""
    return type(left) is type(right) and all(
        a is b or (a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())) for a, b in zip(left, right, strict=True)
    )


def emptied(results: Results) -> Results:
    """Tensors like those of results, which hold what no result is."""
    made: Results = tree_map_only(Tensor, lambda each: torch.full_like(each, -7), results)
    return made


def new_outputs(rows: int, device: torch.device | str = "cpu") -> SampleOutputs:
    """Tensors for results, which hold what no result is."""
    token_ids = torch.full((rows,), -7, device=device)
    return SampleOutputs(token_ids, token_ids.to(torch.int32))


def new_verified(requests: int, width: int) -> VerifyOutputs:
    """The same for a verification of so many drafts each."""
    count = torch.full((requests,), -7)
    token_ids = torch.full((requests, width + 1), -7)
    return VerifyOutputs(token_ids, count, count.clone(), count.clone(), count.to(torch.int32))
