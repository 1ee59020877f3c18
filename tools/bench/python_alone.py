"""How much of a step is Python? The steps of tools/bench/host_steps.py on a CPU, whose replays do nothing.

What is left is what the host does between the driver's calls, and the copies of new numbers, which on a CPU are short.
All steps of all batch sizes take turns of 50 calls; a cell is the least median of its rounds, which other work on the
machine does not move.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table

from compiled_sampler import Sampler
from tools.bench.host import Timed, in_turns, timed
from tools.bench.host_steps import (
    MODES,
    WAY,
    WAY_MODES,
    Bound,
    Step,
    bound_to,
    num_slots,
    sampled_steps,
    verifying_steps,
)

T = TypeVar("T")
_SECONDS = 20.0  # of turns
_VOCAB_SIZE = 1_000  # no time depends on it


class NoDevice:
    """A capture backend whose replays do nothing."""

    def capturing(self) -> bool:
        """Nobody captures."""
        return False

    def warm_up(self, work: Callable[[], T]) -> T:
        """The result of one call."""
        return work()

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """What does nothing."""
        work()
        return lambda: None

    def pool_bytes(self) -> int:
        """None."""
        return 0

    def reset(self) -> None:
        """Nothing is held."""


def replaying_nothing(sampler: Sampler) -> Sampler:
    """A sampler made with the backend "eager", which takes the way of "graph" from now on."""
    sampler._runner.backend = "graph"
    sampler._runner._cache._backend = NoDevice()
    return sampler


def run(batches: Sequence[int], requests: Sequence[int]) -> None:
    """Measure and print, a line a step."""
    with contextlib.ExitStack() as held:
        calls: dict[tuple[str, str, int], Timed] = {}
        for rows in batches:
            calls |= {(*names, rows): timed(step) for names, step in held.enter_context(_sampled(rows)).items()}
        for count in requests:
            calls |= {(*names, count): timed(step) for names, step in _verified(count).items()}
        rounds = in_turns(calls, _SECONDS, lambda: None)
    sizes, lines = sorted({*batches, *requests}), dict.fromkeys((step, mix) for step, mix, _ in calls)
    table = Table("step", "requests", *(f"B={size}" for size in sizes), title="us of Python in a step")
    for names in lines:
        found = (rounds.get((*names, size)) for size in sizes)
        table.add_row(*names, *("" if each is None else f"{min(each):.1f}" for each in found))
    Console(width=130, highlight=False).print(table)


def _sampled(rows: int) -> AbstractContextManager[dict[tuple[str, str], Step]]:
    """The steps of batches of so many rows, with a sampler of their own."""
    sampler, logits = Sampler(_VOCAB_SIZE, num_slots(rows), backend="eager", buckets=[rows]), _logits(rows)
    return sampled_steps(sampler, _warm(sampler, logits, MODES), rows)


def _verified(requests: int) -> dict[tuple[str, str], Step]:
    """The steps that verify drafts of so many requests, with a sampler of their own."""
    sampler = Sampler(_VOCAB_SIZE, requests, backend="eager", buckets=[requests], verifications=[WAY])
    logits = _logits((WAY.width + 1) * requests)
    return verifying_steps(sampler, _warm(sampler, logits, WAY_MODES, verifies=True), requests)


def _logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, _VOCAB_SIZE)


def _warm(sampler: Sampler, logits: torch.Tensor, modes: Sequence[str], *, verifies: bool = False) -> Bound:
    """What is bound to a sampler whose replays do nothing, warmed up."""
    bound = bound_to(replaying_nothing(sampler), logits, verifies=verifies)
    sampler.warmup(modes=modes)
    return bound
