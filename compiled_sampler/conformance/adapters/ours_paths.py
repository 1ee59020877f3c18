"""Every path that this package's sampler can take on a machine; all promise the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from compiled_sampler import SampleOutputs, Sampler
from compiled_sampler.conformance.adapter import Drafted, Params, Verified
from compiled_sampler.conformance.adapters.ours import SLOTS, Ours
from compiled_sampler.conformance.adapters.ours_captured import (
    COVERING,
    CapturedStep,
    CapturedVerification,
    mode_of,
)

REPLAYED_ROWS = (256, 1, 100, 255, 7)
"""Rows of the calls that are replayed, in turn, so that each variant serves batches of several sizes."""

BUCKETS, WIDTH = (1, 256), 8
"""Rows of the captured variants; drafts of the captured verifications."""


class EagerOnCpu(Ours):
    """Plain torch on the CPU, wherever the logits are."""

    backend, place = "eager", "cpu"
    group = "eager CPU"


class CoveringOnCpu(EagerOnCpu):
    """Plain torch on the CPU in the mode that covers every request, whatever the batch needs."""

    mode = COVERING


class CompiledOnCpu(Ours):
    """Compiled by Inductor for the CPU."""

    backend, place = "compiled", "cpu"
    group = "compiled CPU"
    short_on = "cpu"
    """Of short runs on a GPU, its C++ would take longer to compile than all else."""


class Replayed(Ours):
    """Calls that variants of the sampler's own graph cache serve; any other is an error."""

    backend, place = "graph", "cuda"
    group = "cuda"

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Samplers are made when they are first needed."""
        super().__init__(vocab_size, device)
        self._verifiers: dict[str, Sampler] = {}
        self._warm: set[tuple[Sampler, str]] = set()

    def _made(self, dtype: torch.dtype) -> Sampler:
        return Sampler(self.vocab_size, SLOTS, self.device, dtype, self.backend, buckets=BUCKETS)

    def _warmed(self, sampler: Sampler, params: Sequence[Params]) -> Sampler:
        """The sampler with variants for the mode of such requests, which serve any of them too."""
        mode = mode_of(sampler, params)
        if (sampler, mode) not in self._warm:
            sampler.warmup(modes=[mode])
            self._warm.add((sampler, mode))
        return sampler

    def _drawn(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> SampleOutputs:
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
            has_laws, dtype = drafted.probs is not None, drafted.logits.dtype
            self._verifiers[rule] = self._verifier(rule, WIDTH, has_laws, dtype, self.backend)
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
    group = "cuda"


class CompiledOnCuda(Ours):
    """Compiled by Inductor for the GPU, without graphs."""

    backend, place = "compiled", "cuda"
    group = "cuda"


class Captured(CompiledOnCuda):
    """Steps in graphs of an engine's own, one for each number of rows, in the mode that covers every request."""

    mode = COVERING
    group = "captured"
    """Behind the others on the GPU, of whose requests the widest compile the stages of this mode already."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Graphs are captured when they are first needed."""
        super().__init__(vocab_size, device)
        self._steps: dict[tuple[torch.dtype, int], CapturedStep] = {}
        self._verifications: dict[tuple[str, int], CapturedVerification] = {}

    def _drawn(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> SampleOutputs:
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
