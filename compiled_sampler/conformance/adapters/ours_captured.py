"""Requests of this package's sampler for one call, and its steps in a graph that an engine captures and owns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from compiled_sampler import SampleOutputs, Sampler, SamplingParams, VerifyOutputs
from compiled_sampler.conformance.adapter import Drafted, Params, Verified

COVERING = "full"
"""The mode that covers every request."""

Requests = tuple[Sequence[Params], Sequence[int | None]]
"""Parameters and seeds of rows."""


def added(sampler: Sampler, params: Sequence[Params], seeds: Sequence[int | None]) -> tuple[list[int], list[int]]:
    """The slot of each row, and the slots that were taken; rows of one seed and one set of parameters share one."""
    slots: dict[object, int] = {}
    chosen = []
    for row, (each, seed) in enumerate(zip(params, seeds, strict=True)):
        key = (each, seed) if seed is not None else row
        if key not in slots:
            slots[key] = sampler.add_request(SamplingParams(each.temperature, each.top_k, each.top_p, each.min_p, seed))
        chosen.append(slots[key])
    return chosen, list(slots.values())


@contextmanager
def holding(sampler: Sampler, params: Sequence[Params], seeds: Sequence[int | None]) -> Iterator[list[int]]:
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

    Args:
        sampler: on CUDA.
        logits: ``[R, V]``, of the shape and dtype of every call.
        positions: int64 ``[R]``.
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

    def __call__(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> Tensor:
        """The token of each row, int64 ``[R]``; the next call overwrites it."""
        return self.replay(logits, params, seeds, positions).token_ids

    def replay(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> SampleOutputs:
        """Tokens and status of each row; the next call overwrites them."""
        if self._held is None or self._held[0] is not params or self._held[1] is not seeds:
            self._hold(params, seeds)
        self._logits.copy_(logits)
        self._positions.copy_(positions, non_blocking=True)
        self._graph.replay()
        return self._out

    def _hold(self, params: Sequence[Params], seeds: Sequence[int | None]) -> None:
        """Hold these requests instead of those of the calls before."""
        for slot in self._taken:
            self._sampler.remove_request(slot)
        chosen, self._taken = added(self._sampler, params, seeds)
        self._held = (params, seeds)
        self._sampler.flush()
        self._slots.copy_(torch.tensor(chosen))


class CapturedVerification:
    """A verification of so many requests in one CUDA graph, for any requests with up to so many drafts.

    Args:
        sampler: on CUDA.
        drafted: of the numbers of requests and drafts, the dtype and the form of every call.
        rule: of every call.
    """

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
