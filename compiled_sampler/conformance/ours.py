"""This package's sampler: a class for each backend, and for each path that it can take on a machine."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

import compiled_sampler
from compiled_sampler import (
    Logprobs,
    RowStatus,
    SampleOutputs,
    Sampler,
    SamplingParams,
    Verification,
    VerifyOutputs,
)
from compiled_sampler.conformance.adapter import Drafted, Params, Seeds, Semantics, Target, Verified

SEMANTICS = Semantics(padded_vocab=True, largest_logit=2e38, rules=("match", "rejection", "block"))
SLOTS, BUCKETS = 2**15, tuple(2**n for n in range(7))
REPLAYED_VOCAB = 512
"""Of the comparisons of batches, whose small calls are replayed where graphs are captured; calls of laws are large."""

MOST_GIVEN = 64
"""Tokens of a vocabulary whose logprobs are always asked for together: what is compiled depends on how many are."""

REPLAYED_ROWS = (256, 1, 100, 255, 7)
"""Rows of the calls that are replayed, in turn, so that each variant serves batches of several sizes."""

REPLAYED_BUCKETS, REPLAYED_WIDTH = (1, 256), 8
"""Rows of the captured variants, and drafts of the captured verifications."""

COVERING = "full"
"""The mode that covers every request."""

Requests = tuple[Sequence[Params], Seeds]
"""Parameters and seeds of rows."""

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


@contextmanager
def holding(sampler: Sampler, params: Sequence[Params], seeds: Seeds) -> Iterator[list[int]]:
    """The slot of each row, while the requests are held."""
    chosen, taken = added(sampler, params, seeds)
    try:
        yield chosen
    finally:
        for slot in taken:
            sampler.remove_request(slot)


def mode_of(sampler: Sampler, params: Sequence[Params]) -> str:
    """The name of the cheapest mode that covers rows of these parameters."""
    with holding(sampler, params, [0] * len(params)) as slots:
        return sampler.plan(slots).mode.name


class CapturedStep:
    """A sampling step of so many rows in one CUDA graph, for any requests; called, it copies inputs in and replays.

    Calls with the same lists of parameters and seeds are further steps of the same requests, as in decoding: they add
    none.
    """

    def __init__(self, sampler: Sampler, logits: Tensor, positions: Tensor) -> None:
        """Run the step once, which may compile, and capture it."""
        self._sampler = sampler
        self._held: Requests | None = None
        self._taken: list[int] = []
        self._logits, self._positions = logits.clone(), positions.to(sampler.device, copy=True)
        plan = sampler.plan([-1] * len(logits), COVERING)
        self._slots = plan.slot_ids.clone()
        plan = dataclasses.replace(plan, slot_ids=self._slots)
        sampler.sample(plan, self._logits, self._positions)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = sampler.sample(plan, self._logits, self._positions)

    def __call__(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        """The token of each row, int64 ``[R]``; the next call overwrites it."""
        return self.replay(logits, params, seeds, positions).token_ids

    def replay(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> SampleOutputs:
        """Tokens and status of each row; the next call overwrites them."""
        if self._held is None or self._held[0] is not params or self._held[1] is not seeds:
            self._hold(params, seeds)
        self._logits.copy_(logits)
        self._positions.copy_(positions, non_blocking=True)
        self._graph.replay()
        return self._out

    def _hold(self, params: Sequence[Params], seeds: Seeds) -> None:
        """Hold these requests instead of those of the calls before."""
        for slot in self._taken:
            self._sampler.remove_request(slot)
        chosen, self._taken = added(self._sampler, params, seeds)
        self._held = (params, seeds)
        self._sampler.flush()
        self._slots.copy_(torch.tensor(chosen))


class CapturedVerification:
    """A verification of so many requests in one CUDA graph, for any requests with up to so many drafts."""

    def __init__(self, sampler: Sampler, drafted: Drafted, rule: str) -> None:
        """Run the step once, which may compile, and capture it."""
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

        def step() -> VerifyOutputs:
            tensors = (self._logits, self._drafts, self._positions)
            return sampler.verify(plan, *tensors, rule, draft_probs=self._laws)

        step()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = step()

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
            self._graph.replay()
            out = self._out
            return Verified(out.token_ids.cpu(), out.num_emitted.cpu(), out.num_accepted.cpu())


class Ours:
    """The sampler with the backend that it chooses itself; requests are added for a call and removed behind it."""

    semantics: ClassVar[Semantics] = SEMANTICS
    backend: ClassVar[str] = "auto"
    place: ClassVar[str | None] = None
    """Where it draws, wherever the logits are; None: where the adapter is made for."""
    mode: ClassVar[str | None] = None
    """Of every sampling plan; None: the cheapest that covers the batch."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Samplers are made when a dtype is first met."""
        self.vocab_size, self.device = vocab_size, torch.device(self.place or device)
        self._samplers: dict[torch.dtype, Sampler] = {}

    @staticmethod
    def versions() -> dict[str, str]:
        """The version of this package, and the commit where it is a checkout."""
        return {"compiled-sampler": compiled_sampler.__version__, **commit()}

    def _sampler(self, dtype: torch.dtype) -> Sampler:
        """The sampler of a dtype, made once."""
        if dtype not in self._samplers:
            self._samplers[dtype] = self._made(dtype)
        return self._samplers[dtype]

    def _made(self, dtype: torch.dtype) -> Sampler:
        """A sampler; where graphs are captured, small batches are replayed."""
        sampler = Sampler(self.vocab_size, SLOTS, self.device, dtype, self.backend, buckets=BUCKETS)
        if sampler.backend == "graph" and self.device.type == "cuda" and self.vocab_size == REPLAYED_VOCAB:
            sampler.warmup()
        return sampler

    def _drawn(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> SampleOutputs:
        sampler = self._sampler(logits.dtype)
        with holding(sampler, params, seeds) as slots:
            plan = sampler.plan(slots, self.mode)
            return sampler.sample(plan, logits.to(self.device), positions.to(self.device))

    def sample(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        """The token of each row, int64 ``[R]``."""
        return self._drawn(logits, params, seeds, positions).token_ids

    def status(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> list[set[str]]:
        """What was wrong with each row."""
        return self.sample_with_status(logits, params, seeds, positions)[1]

    def sample_with_status(
        self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor
    ) -> tuple[Tensor, list[set[str]]]:
        """The token of each row, int64 ``[R]``, and what was wrong with it."""
        drawn = self._drawn(logits, params, seeds, positions)
        flags = drawn.status.tolist()
        return drawn.token_ids, [{name for bit, name in NAMES.items() if row_flags & bit} for row_flags in flags]

    def probs(self, logits: Tensor, params: Sequence[Params]) -> Tensor:
        """The law of each row, float32 ``[R, V]``."""
        sampler = self._sampler(logits.dtype)
        with holding(sampler, params, [0] * len(params)) as slots:
            return sampler.probs(sampler.plan(slots), logits.to(self.device))

    def logprobs(self, logits: Tensor, params: Sequence[Params], token_ids: Tensor) -> Tensor:
        """Of the law that is drawn from, float32 ``[R]``."""
        few = self.vocab_size <= MOST_GIVEN
        ids = list(range(self.vocab_size)) if few else sorted(set(token_ids.tolist()))
        sampler = self._sampler(logits.dtype)
        wanted = Logprobs(of="filtered", token_ids=tuple(ids))
        places = torch.zeros(len(logits), dtype=torch.int64, device=self.device)
        with holding(sampler, params, [0] * len(params)) as slots:
            out = sampler.sample(sampler.plan(slots, self.mode), logits.to(self.device), places, logprobs=wanted)
        of_ids = None if out.logprobs is None else out.logprobs.given
        assert of_ids is not None  # they were asked for
        column = torch.searchsorted(torch.tensor(ids), token_ids.cpu()).to(self.device)
        return of_ids.gather(1, column[:, None])[:, 0]

    def draft(
        self,
        logits: Tensor,
        params: Sequence[Params],
        seeds: Seeds,
        positions: Tensor,
        offset: int,
        rule: str,
    ) -> Tensor:
        """One draft of each request, coupled to the target's noise under match; int64 ``[N]``."""
        sampler = self._sampler(logits.dtype)
        with holding(sampler, params, seeds) as slots:
            plan, x, places = sampler.plan(slots), logits.to(self.device), positions.to(self.device)
            return sampler.draft(plan, x, places, rule == "match", offset).drawn.token_ids

    def verify(self, drafted: Drafted, rule: str) -> Verified:
        """What is committed of each request."""
        return self._verified(self._sampler(drafted.logits.dtype), drafted, rule)

    def _verified(self, sampler: Sampler, drafted: Drafted, rule: str) -> Verified:
        logits, drafts, positions = drafted.logits, drafted.drafts.to(self.device), drafted.positions.to(self.device)
        laws = None if drafted.probs is None else drafted.probs.to(self.device)
        with holding(sampler, drafted.params, drafted.seeds) as slots:
            plan = sampler.plan(slots, self.mode, drafted.num_drafts)
            out = sampler.verify(plan, logits.to(self.device), drafts, positions, rule, draft_probs=laws)
            return Verified(out.token_ids, out.num_emitted, out.num_accepted)

    @property
    def capture(self) -> Callable[..., CapturedStep] | None:
        """Captures a call in a graph of its own, as an engine does; None where nothing can be captured."""
        return self._captured if self.device.type == "cuda" else None

    def _captured(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> CapturedStep:
        return CapturedStep(self._sampler(logits.dtype), logits, positions)

    def paths(self) -> dict[str, Target]:
        """Every backend and route of this machine but its own."""
        own = (self.backend, self.device.type, self.mode)
        return {
            name: path
            for name, path in PATHS.items()
            if (path.place == "cpu" or torch.cuda.is_available()) and (path.backend, path.place, path.mode) != own
        }


def commit() -> dict[str, str]:
    """The commit that this package is a checkout of, or ``COMMIT`` of the environment; nothing if it is neither."""
    if "COMMIT" in os.environ:
        return {"commit": os.environ["COMMIT"]}
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return {"commit": subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}
    except (OSError, subprocess.CalledProcessError):
        return {}


class Eager(Ours):
    """Plain torch."""

    backend = "eager"


class Compiled(Ours):
    """Compiled by Inductor."""

    backend = "compiled"


class Graph(Ours):
    """Compiled and captured in CUDA graphs."""

    backend = "graph"


class EagerOnCpu(Ours):
    """Plain torch on the CPU, wherever the logits are."""

    backend, place = "eager", "cpu"


class CoveringOnCpu(EagerOnCpu):
    """Plain torch on the CPU in the mode that covers every request, whatever the batch needs."""

    mode = COVERING


class CompiledOnCpu(Ours):
    """Compiled by Inductor for the CPU."""

    backend, place = "compiled", "cpu"
    short_on = "cpu"
    """Of short runs on a GPU, its C++ would take longer to compile than all else."""


class Replayed(Ours):
    """Calls that variants of the sampler's own graph cache serve; any other is an error."""

    backend, place = "graph", "cuda"

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Samplers are made when they are first needed."""
        super().__init__(vocab_size, device)
        self._verifiers: dict[str, Sampler] = {}
        self._warm: set[tuple[Sampler, str]] = set()

    def _made(self, dtype: torch.dtype) -> Sampler:
        return Sampler(self.vocab_size, SLOTS, self.device, dtype, self.backend, buckets=REPLAYED_BUCKETS)

    def _warmed(self, sampler: Sampler, params: Sequence[Params]) -> Sampler:
        """The sampler with variants for the mode of such requests, which serve any of them too."""
        mode = mode_of(sampler, params)
        if (sampler, mode) not in self._warm:
            sampler.warmup(modes=[mode])
            self._warm.add((sampler, mode))
        return sampler

    def _drawn(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> SampleOutputs:
        """Many small calls of several sizes."""
        results: list[SampleOutputs] = []
        start, sampler = 0, self._warmed(self._sampler(logits.dtype), params)
        while start < len(logits):
            rows = slice(start, start + REPLAYED_ROWS[len(results) % len(REPLAYED_ROWS)])
            with served_by_graphs(sampler):
                results.append(super()._drawn(logits[rows], params[rows], seeds[rows], positions[rows]))
            start = rows.stop
        return SampleOutputs(torch.cat([r.token_ids for r in results]), torch.cat([r.status for r in results]))

    def verify(self, drafted: Drafted, rule: str) -> Verified:
        """What is committed of each request."""
        if rule not in self._verifiers:
            way = Verification(rule, REPLAYED_WIDTH, "one_hot" if drafted.probs is None else "probabilities")
            self._verifiers[rule] = Sampler(
                self.vocab_size,
                SLOTS,
                self.device,
                drafted.logits.dtype,
                self.backend,
                buckets=REPLAYED_BUCKETS[-1:],
                verifications=(way,),
            )
        sampler = self._warmed(self._verifiers[rule], drafted.params)
        with served_by_graphs(sampler):
            return self._verified(sampler, drafted, rule)


@contextmanager
def served_by_graphs(sampler: Sampler) -> Iterator[None]:
    """Calls of the sampler that graphs must serve.

    Raises:
        RuntimeError: a call was not served by a graph, or there was none.
    """
    before = sampler.statistics()
    yield
    after = sampler.statistics()
    replays, others = after.replays - before.replays, after.direct_runs - before.direct_runs
    if others or not replays:
        raise RuntimeError(f"graphs must serve every call, got {replays} replays and {others} direct runs")


class EagerOnCuda(Ours):
    """Plain torch on the GPU."""

    backend, place = "eager", "cuda"


class CompiledOnCuda(Ours):
    """Compiled by Inductor for the GPU, without graphs."""

    backend, place = "compiled", "cuda"


class Captured(CompiledOnCuda):
    """Steps in graphs of an engine's own, one for each number of rows, in the mode that covers every request."""

    mode = COVERING

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Graphs are captured when they are first needed."""
        super().__init__(vocab_size, device)
        self._steps: dict[tuple[torch.dtype, int], CapturedStep] = {}
        self._verifications: dict[tuple[str, int], CapturedVerification] = {}

    def _drawn(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> SampleOutputs:
        key = (logits.dtype, len(logits))
        if key not in self._steps:
            self._steps[key] = CapturedStep(self._sampler(logits.dtype), logits.to(self.device), positions)
        out = self._steps[key].replay(logits, params, seeds, positions)
        return SampleOutputs(out.token_ids.clone(), out.status.clone())

    def verify(self, drafted: Drafted, rule: str) -> Verified:
        """What is committed of each request."""
        key = (rule, len(drafted.drafts))
        if key not in self._verifications:
            self._verifications[key] = CapturedVerification(self._sampler(drafted.logits.dtype), drafted, rule)
        return self._verifications[key](drafted)


PATHS: dict[str, type[Ours]] = {
    "replayed": Replayed,
    "eager CUDA": EagerOnCuda,
    "compiled CUDA": CompiledOnCuda,
    "captured in an outer graph": Captured,
    "compiled CPU": CompiledOnCpu,
    "eager CPU": EagerOnCpu,
    "eager CPU, covering mode": CoveringOnCpu,
}
"""By name. Those on the GPU come first: while they are compiled, nothing else compiles the same."""
