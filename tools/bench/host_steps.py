"""The steps whose host's part is measured: of an engine over one sampler, to which its tensors are bound.

They may take turns: a request that leaves is in no batch that another step keeps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from compiled_sampler import SampleOutputs, Sampler, SamplingParams, Verification, VerifyOutputs

Step = Callable[[], object]
MODES = ["greedy", "top_k_top_p[64]", "full"]  # that serve the batches of MIXES
WAY, WAY_MODES = Verification("match", 3), ["top_k_top_p[64]"]  # of the verifications, and the modes that serve them
_OTHERS = 128  # requests besides those of a batch: more batches than plans that a sampler keeps
_COUNTS = (torch.int64, torch.int64, torch.int64, torch.int32)  # of the fields of VerifyOutputs after the tokens

MIXES: dict[str, tuple[SamplingParams, ...]] = {
    "mixed modes": (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
        SamplingParams(min_p=0.05),
        SamplingParams(top_p=0.9),
        SamplingParams(),
    ),
    "k 50 + p .9": (SamplingParams(temperature=0.8, top_k=50, top_p=0.9),),
}
"""Parameters that the requests of a batch take in turn."""


class Bound(NamedTuple):
    """The tensors of an engine, whose first rows each step reads and writes."""

    logits: torch.Tensor
    positions: torch.Tensor
    draft_token_ids: torch.Tensor | None
    out: Any
    """Results of samples, or of verifications in ``WAY``."""


def bound_to(sampler: Sampler, logits: torch.Tensor, *, verifies: bool = False) -> Bound:
    """New tensors for batches of as many rows as the logits have, bound to a sampler."""
    rows, device = len(logits), logits.device
    tokens = torch.zeros(rows, *((WAY.width + 1,) if verifies else ()), dtype=torch.int64, device=device)
    singles = [torch.zeros(rows, dtype=dtype, device=device) for dtype in (_COUNTS if verifies else _COUNTS[-1:])]
    out = VerifyOutputs(tokens, *singles) if verifies else SampleOutputs(tokens, *singles)
    drafts = torch.zeros(rows, WAY.width, dtype=torch.int64, device=device) if verifies else None
    made = Bound(logits, torch.arange(rows, device=device), drafts, out)
    sampler.bind(**made._asdict())
    return made


def first_rows(out: Any, rows: int) -> Any:
    """Views of the first rows of results."""
    return type(out)(*(field if field is None else field[:rows] for field in out))


def num_slots(rows: int) -> int:
    """Slots that the requests of ``sampled_steps`` take."""
    return len(MIXES) * (rows + _OTHERS)


@contextlib.contextmanager
def sampled_steps(sampler: Sampler, bound: Bound, rows: int) -> Iterator[dict[tuple[str, str], Step]]:
    """The steps of batches of so many rows, by their names and those of their parameters; see ``Steps``."""
    mixes = {mix: Steps(sampler, bound, params, rows) for mix, params in MIXES.items()}
    yield {(name, mix): step for mix, steps in mixes.items() for name, step in steps.named()}
    for steps in mixes.values():
        steps.close()


class Steps:
    """The steps of an engine over one sampler, all of it warmed up.

    Args:
        sampler: with ``num_slots`` slots.
        bound: to it.
        mix: parameters that requests take in turn.
        rows: of a batch.
    """

    def __init__(self, sampler: Sampler, bound: Bound, mix: Sequence[SamplingParams], rows: int) -> None:
        """Add the requests."""
        self._sampler, self._mix, self._rows = sampler, mix, rows
        self._logits, self._positions = bound.logits[:rows], bound.positions[:rows]
        self._out = first_rows(bound.out, rows)
        self._params = itertools.cycle([dataclasses.replace(each, seed=i) for i, each in enumerate(mix)])
        self._slots = [sampler.add_request(next(self._params)) for _ in range(rows + _OTHERS)]
        self._first, self._leaving = itertools.count(), itertools.count()

    def close(self) -> None:
        """Remove the requests."""
        for slot in self._slots:
            self._sampler.remove_request(slot)

    def named(self) -> Iterator[tuple[str, Step]]:
        """Each step with its name."""
        kept = self._sampler.plan(self._slots[: self._rows])
        yield "kept plan, out=", lambda: self._sampler.sample(kept, self._logits, self._positions, self._out)
        yield "kept plan", lambda: self._sampler.sample(kept, self._logits, self._positions)
        yield "another batch", lambda: self._sampled(self._batch())
        yield "one request leaves, another comes", self._churn

    def _batch(self) -> list[int]:
        first = next(self._first) % _OTHERS
        return self._slots[first : first + self._rows]

    def _sampled(self, slots: list[int]) -> object:
        return self._sampler.sample(self._sampler.plan(slots), self._logits, self._positions, self._out)

    def _churn(self) -> object:
        place = -1 - next(self._leaving) % min(self._rows, _OTHERS)  # none of the kept plan, which has the first rows
        self._sampler.remove_request(self._slots[place])
        self._slots[place] = self._sampler.add_request(next(self._params))
        return self._sampled(self._slots[-self._rows :])


def verifying_steps(sampler: Sampler, bound: Bound, requests: int) -> dict[tuple[str, str], Step]:
    """Steps that verify other numbers of drafts each time, and one that draws its drafts, by names and parameters."""
    chance, mix = random.Random(0), "k 50 + p .9"
    slots = [sampler.add_request(dataclasses.replace(*MIXES[mix], seed=i)) for i in range(requests)]
    logits, positions, out = bound.logits, bound.positions[:requests], first_rows(bound.out, requests)
    assert bound.draft_token_ids is not None
    drafts = bound.draft_token_ids[:requests]
    ragged = [[chance.randint(0, WAY.width) for _ in slots] for _ in range(200)]
    batches = itertools.cycle([(counts, logits[: requests + sum(counts)]) for counts in ragged])

    def verified(planned: Sequence[int]) -> Sequence[int]:
        counts, rows = next(batches)
        plan = sampler.plan(planned, num_drafts=counts)
        sampler.verify(plan, rows, drafts, positions, out=out)
        return plan.slots

    def again() -> None:
        nonlocal known
        known = verified(known)

    kept = sampler.plan(slots, num_drafts=[WAY.width] * requests)
    places = [positions + offset for offset in range(WAY.width)]

    def drafted() -> None:
        handles = [sampler.draft(kept, logits[:requests], at, offset=offset) for offset, at in enumerate(places)]
        sampler.verify(kept, logits[: kept.num_rows], handles, positions, out=out)

    known = verified(slots)
    return {
        ("verify, new ragged plan", mix): lambda: verified(slots),
        ("verify, other drafts of a plan", mix): again,
        (f"{WAY.width} drafts, verify, kept plan", mix): drafted,
    }
