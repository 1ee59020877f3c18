"""Adapters of this package's sampler: one for each backend, and for each path that it can take on a machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

import compiled_sampler
from compiled_sampler import Logprobs, RowStatus, SampleOutputs, Sampler, SamplingParams, Verification
from compiled_sampler.conformance.adapter import Drafted, Params, Seeds, Semantics, Target, Verified
from compiled_sampler.selfcheck.cases import by_compiled_stages

T = TypeVar("T")

SLOTS, BUCKETS = 2**15, tuple(2**n for n in range(7))
REPLAYED_VOCAB = 512
"""Of the comparisons of batches, whose small calls are replayed where graphs are captured; calls of laws are large."""

MOST_GIVEN = 64
"""Tokens of a vocabulary whose logprobs are always asked for together: what is compiled depends on how many are."""

REPLAYED_ROWS = (256, 1, 100, 255, 7)
"""Rows of the calls that are replayed, in turn, so that each variant serves batches of several sizes."""

REPLAYED_BUCKETS, REPLAYED_WIDTH = (1, 256), 8
"""Rows of the captured variants, and drafts of the captured verifications."""

COVERING = "full"  # the mode that covers every request

NAMES = {RowStatus.NAN_SEEN: "nan", RowStatus.POSITIVE_INFINITY: "infinity", RowStatus.ALL_MASKED: "all_masked"}


def added(sampler: Sampler, params: Sequence[Params], seeds: Seeds) -> tuple[list[int], list[int]]:
    """The slot of each row, and the slots that were taken; rows of one seed and one set of parameters share one."""
    slots: dict[object, int] = {}
    chosen = []
    for row, (p, seed) in enumerate(zip(params, seeds, strict=True)):
        key = (p, seed) if seed is not None else row
        if key not in slots:
            slots[key] = sampler.add_request(SamplingParams(p.temperature, p.top_k, p.top_p, p.min_p, seed))
        chosen.append(slots[key])
    return chosen, list(slots.values())


@contextlib.contextmanager
def holding(sampler: Sampler, params: Sequence[Params], seeds: Seeds) -> Iterator[list[int]]:
    """The slot of each row, while the requests are held."""
    chosen, taken = added(sampler, params, seeds)
    try:
        yield chosen
    finally:
        for slot in taken:
            sampler.remove_request(slot)


class Ours:
    """The sampler with the backend that it chooses itself; requests are added for a call and removed after it."""

    semantics: ClassVar = Semantics(padded_vocab=True, largest_logit=2e38, rules=("match", "rejection", "block"))
    backend: ClassVar[str] = "auto"
    place: ClassVar[str | None] = None  # where it draws, wherever the logits are; None: where the adapter is made for
    mode: ClassVar[str | None] = None  # of every sampling plan; None: the cheapest that covers the batch

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, torch.device(self.place or device)
        self._samplers: dict[object, Sampler] = {}

    @staticmethod
    def versions() -> dict[str, str]:
        """The version of this package, and the commit where it is a checkout or the environment has ``COMMIT``."""
        versions, commit = {"compiled-sampler": compiled_sampler.__version__}, os.environ.get("COMMIT")
        root = Path(__file__).parents[2]
        if commit is None and (root / ".git").exists():  # not that of a repository which an environment lies in
            command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        return versions | ({"commit": commit} if commit else {})

    def _sampler(self, dtype: torch.dtype) -> Sampler:
        """The sampler of a dtype; where graphs are captured, small batches are replayed."""
        if dtype not in self._samplers:
            sampler = Sampler(self.vocab_size, SLOTS, self.device, dtype, self.backend, buckets=BUCKETS)
            if sampler.backend == "graph" and self.device.type == "cuda" and self.vocab_size == REPLAYED_VOCAB:
                sampler.warmup()
            self._samplers[dtype] = sampler
        return self._samplers[dtype]

    def _called(
        self,
        sampler: Sampler,
        params: Sequence[Params],
        seeds: Seeds,
        call: Callable[..., T],
        *arguments: object,
        mode: str | None = None,
        num_drafts: Sequence[int] | None = None,
        **options: object,
    ) -> T:
        """What a call returns for a plan of the requests, which are held meanwhile; tensors are moved to the device."""
        moved = [x.to(self.device) if isinstance(x, Tensor) else x for x in arguments]
        with holding(sampler, params, seeds) as slots:
            plan = sampler.plan(slots, mode, num_drafts)
            return by_compiled_stages(sampler, functools.partial(call, plan, *moved, **options))

    def _drawn(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> SampleOutputs:
        sampler = self._sampler(logits.dtype)
        return self._called(sampler, params, seeds, sampler.sample, logits, positions, mode=self.mode)

    def sample(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        return self._drawn(logits, params, seeds, positions).token_ids

    def status(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> list[set[str]]:
        return self.sample_with_status(logits, params, seeds, positions)[1]

    def sample_with_status(
        self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor
    ) -> tuple[Tensor, list[set[str]]]:
        out = self._drawn(logits, params, seeds, positions)
        return out.token_ids, [{name for bit, name in NAMES.items() if flags & bit} for flags in out.status.tolist()]

    def probs(self, logits: Tensor, params: Sequence[Params]) -> Tensor:
        sampler = self._sampler(logits.dtype)
        return self._called(sampler, params, [0] * len(params), sampler.probs, logits)

    def logprobs(self, logits: Tensor, params: Sequence[Params], token_ids: Tensor) -> Tensor:
        few = self.vocab_size <= MOST_GIVEN
        ids = list(range(self.vocab_size)) if few else sorted(set(token_ids.tolist()))
        sampler, wanted = self._sampler(logits.dtype), Logprobs(of="filtered", token_ids=tuple(ids))
        seeds, places = [0] * len(logits), torch.zeros(len(logits), dtype=torch.int64)
        out = self._called(sampler, params, seeds, sampler.sample, logits, places, mode=self.mode, logprobs=wanted)
        of_ids = None if out.logprobs is None else out.logprobs.given
        assert of_ids is not None  # they were asked for
        column = torch.searchsorted(torch.tensor(ids), token_ids.cpu()).to(self.device)
        return of_ids.gather(1, column[:, None])[:, 0]

    def draft(
        self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor, offset: int, rule: str
    ) -> Tensor:
        sampler = self._sampler(logits.dtype)
        arguments = logits, positions, rule == "match", offset
        return self._called(sampler, params, seeds, sampler.draft, *arguments).drawn.token_ids

    def verify(self, drafted: Drafted, rule: str) -> Verified:
        return self._verified(self._sampler(drafted.logits.dtype), drafted, rule)

    def verify_trees(self, drafted: Drafted, parents: Tensor) -> Verified:
        return self._verified(self._sampler(drafted.logits.dtype), drafted, "match", parents.to(self.device))

    def _verified(self, sampler: Sampler, drafted: Drafted, rule: str, parents: Tensor | None = None) -> Verified:
        logits, params, seeds, positions, drafts, num_drafts, laws = drafted
        laws = None if laws is None else laws.to(self.device)
        verify = functools.partial(sampler.verify, parents=parents, draft_probs=laws)
        arguments, mode = (logits, drafts, positions, rule), self.mode
        out = self._called(sampler, params, seeds, verify, *arguments, mode=mode, num_drafts=num_drafts)
        return Verified(out.token_ids, out.num_emitted, out.num_accepted)

    @property
    def capture(self) -> Callable[..., Callable[..., Tensor]] | None:
        """Captures a call in a graph of its own, as an engine does; None where nothing can be captured."""

        def capture(logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Callable[..., Tensor]:
            step = CapturedStep(self._sampler(logits.dtype), logits, positions)
            return lambda *rows: step(*rows).token_ids

        return capture if self.device.type == "cuda" else None

    def paths(self) -> dict[str, Target]:
        """Every backend and route of this machine but its own."""
        own = (self.backend, self.device.type, self.mode)
        return {
            name: path
            for name, path in PATHS.items()
            if (path.place == "cpu" or torch.cuda.is_available()) and (path.backend, path.place, path.mode) != own
        }


class Eager(Ours):
    """Plain torch."""

    backend = "eager"


class Compiled(Ours):
    """Compiled by Inductor."""

    backend = "compiled"


class Graph(Ours):
    """Compiled and captured in CUDA graphs."""

    backend = "graph"


def placed(backend: type[Ours], device: str, mode_name: str | None = None) -> type[Ours]:
    """An adapter of a backend that draws on one type of device, and in one mode if it is named."""

    class Placed(backend):  # type: ignore[misc, valid-type]
        place, mode = device, mode_name

    return Placed


class CompiledOnCpu(Compiled):
    """Compiled by Inductor for the CPU."""

    place = "cpu"
    short_on = "cpu"
    """Of short runs on a GPU, its C++ would take longer to compile than all else."""


class Replayed(Graph):
    """Calls that variants of the sampler's own graph cache serve; any other is an error."""

    place = "cuda"

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._warm: set[tuple[Sampler, str]] = set()

    def _warmed(self, params: Sequence[Params], dtype: torch.dtype, way: Verification | None = None) -> Sampler:
        """A sampler, for one way to verify or for sampling, with variants for the mode of such requests."""
        if (dtype, way) not in self._samplers:
            buckets, ways = (REPLAYED_BUCKETS, ()) if way is None else (REPLAYED_BUCKETS[-1:], (way,))
            self._samplers[dtype, way] = Sampler(
                self.vocab_size, SLOTS, self.device, dtype, self.backend, buckets=buckets, verifications=ways
            )
        sampler = self._samplers[dtype, way]
        with holding(sampler, params, [0] * len(params)) as slots:
            mode = sampler.plan(slots).mode.name
        if (sampler, mode) not in self._warm:
            sampler.warmup(modes=[mode])
            self._warm.add((sampler, mode))
        return sampler

    def _drawn(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> SampleOutputs:
        """Many small calls of several sizes."""
        results: list[SampleOutputs] = []
        start, sampler = 0, self._warmed(params, logits.dtype)
        while start < len(logits):
            rows = slice(start, start + REPLAYED_ROWS[len(results) % len(REPLAYED_ROWS)])
            with served_by_graphs(sampler):
                requests, tensors = (params[rows], seeds[rows]), (logits[rows], positions[rows])
                results.append(self._called(sampler, *requests, sampler.sample, *tensors))
            start = rows.stop
        return SampleOutputs(torch.cat([r.token_ids for r in results]), torch.cat([r.status for r in results]))

    def verify(self, drafted: Drafted, rule: str) -> Verified:
        way = Verification(rule, REPLAYED_WIDTH, "one_hot" if drafted.probs is None else "probabilities")
        sampler = self._warmed(drafted.params, drafted.logits.dtype, way)
        with served_by_graphs(sampler):
            return self._verified(sampler, drafted, rule)


@contextlib.contextmanager
def served_by_graphs(sampler: Sampler) -> Iterator[None]:
    """Calls of the sampler, with RuntimeError if one was not served by a graph, or there was none."""
    before = sampler.statistics()
    yield
    after = sampler.statistics()
    replays, others = after.replays - before.replays, after.direct_runs - before.direct_runs
    if others or not replays:
        raise RuntimeError(f"graphs must serve every call, got {replays} replays and {others} direct runs")


def captured(sampler: Sampler, step: Callable[[], T]) -> Callable[[], T]:
    """Replays a step from one CUDA graph, into the same results; the step runs compiled once before."""
    by_compiled_stages(sampler, step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> T:
        graph.replay()
        return out

    return replay


class CapturedStep:
    """A sampling step of so many rows in one CUDA graph, for any requests; called, it copies inputs in and replays."""

    def __init__(self, sampler: Sampler, logits: Tensor, positions: Tensor) -> None:
        self._sampler = sampler
        self._params: Sequence[Params] | None = None
        self._seeds: Seeds | None = None
        self._taken: list[int] = []
        self._logits, self._positions = logits.clone(), positions.to(sampler.device, copy=True)
        plan = sampler.plan([-1] * len(logits), COVERING)
        self._slots = plan.slot_ids.clone()
        plan = dataclasses.replace(plan, slot_ids=self._slots)
        self._replay = captured(sampler, lambda: sampler.sample(plan, self._logits, self._positions))

    def __call__(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> SampleOutputs:
        """Tokens and status of each row; the next call overwrites them."""
        # The same lists are further steps of the same requests, as in decoding: they add none.
        if self._params is not params or self._seeds is not seeds:
            for slot in self._taken:
                self._sampler.remove_request(slot)
            chosen, self._taken = added(self._sampler, params, seeds)
            self._params, self._seeds = params, seeds
            self._sampler.flush()
            self._slots.copy_(torch.tensor(chosen))
        self._logits.copy_(logits)
        self._positions.copy_(positions, non_blocking=True)
        return self._replay()


class CapturedVerification:
    """A verification of so many requests in one CUDA graph, for any requests with up to so many drafts."""

    def __init__(self, sampler: Sampler, drafted: Drafted, rule: str) -> None:
        count, width = drafted.drafts.shape
        plan = sampler.plan([-1] * count, COVERING, [width] * count)
        self._sampler, self._slots, self._counts = sampler, plan.slot_ids.clone(), torch.zeros_like(plan.slot_ids)
        rows, columns = plan.num_rows, drafted.logits.shape[1]
        self._logits = torch.zeros(rows, columns, dtype=drafted.logits.dtype, device=sampler.device)
        self._drafts = torch.full((count, width), -1, device=sampler.device)
        self._positions = torch.zeros_like(plan.slot_ids)
        shape = (plan.num_proposals, columns)
        self._laws = None if drafted.probs is None else torch.zeros(shape, device=sampler.device)
        plan = dataclasses.replace(plan, slot_ids=self._slots, draft_counts=self._counts)
        tensors = (self._logits, self._drafts, self._positions)
        self._replay = captured(sampler, lambda: sampler.verify(plan, *tensors, rule, draft_probs=self._laws))

    def __call__(self, drafted: Drafted) -> Verified:
        """What is committed of each request, on the CPU."""
        with holding(self._sampler, drafted.params, drafted.seeds) as slots:
            self._sampler.flush()
            self._slots.copy_(torch.tensor(slots))
            self._counts.copy_(torch.tensor(drafted.num_drafts))
            self._logits[: len(drafted.logits)].copy_(drafted.logits)
            self._drafts.copy_(drafted.drafts)
            self._positions.copy_(drafted.positions)
            if self._laws is not None and drafted.probs is not None:
                self._laws[: len(drafted.probs)].copy_(drafted.probs)
            out = self._replay()
            return Verified(out.token_ids.cpu(), out.num_emitted.cpu(), out.num_accepted.cpu())


class Captured(Compiled):
    """Steps in graphs of an engine's own, one for each number of rows, in the mode that covers every request."""

    place, mode = "cuda", COVERING

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._steps: dict[tuple[torch.dtype, int], CapturedStep] = {}
        self._verifications: dict[tuple[str, int], CapturedVerification] = {}

    def _drawn(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> SampleOutputs:
        key = (logits.dtype, len(logits))
        if key not in self._steps:
            self._steps[key] = CapturedStep(self._sampler(logits.dtype), logits.to(self.device), positions)
        out = self._steps[key](logits, params, seeds, positions)
        return SampleOutputs(out.token_ids.clone(), out.status.clone())

    def verify(self, drafted: Drafted, rule: str) -> Verified:
        key = (rule, len(drafted.drafts))
        if key not in self._verifications:
            self._verifications[key] = CapturedVerification(self._sampler(drafted.logits.dtype), drafted, rule)
        return self._verifications[key](drafted)


PATHS: dict[str, type[Ours]] = {
    "replayed": Replayed,
    "eager CUDA": placed(Eager, "cuda"),
    "compiled CUDA": placed(Compiled, "cuda"),
    "captured in an outer graph": Captured,
    "compiled CPU": CompiledOnCpu,
    "eager CPU": placed(Eager, "cpu"),
    "eager CPU, covering mode": placed(Eager, "cpu", COVERING),
}
"""By name. Those on the GPU come first: while they are compiled, nothing else compiles the same."""
