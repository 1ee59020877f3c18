"""The steps whose host's part is measured: of an engine over one sampler, whose tensors come back in each step.

They may take turns: a request that leaves is in no batch that another step keeps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

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


def num_slots(rows: int) -> int:
    """Slots that the requests of ``sampled_steps`` take."""
    return len(MIXES) * (rows + _OTHERS)


@contextlib.contextmanager
def sampled_steps(sampler: Sampler, logits: torch.Tensor, rows: int) -> Iterator[dict[tuple[str, str], Step]]:
    """The steps of batches of so many rows, by their names and those of their parameters; see ``Steps``."""
    mixes = {mix: Steps(sampler, logits, params, rows) for mix, params in MIXES.items()}
    yield {(name, mix): step for mix, steps in mixes.items() for name, step in steps.named()}
    for steps in mixes.values():
        steps.close()


class Steps:
    """The steps of an engine over one sampler, all of it warmed up.

    Args:
        sampler: with ``num_slots`` slots, and logits bound.
        logits: the bound buffer.
        mix: parameters that requests take in turn.
        rows: of a batch.
    """

    def __init__(self, sampler: Sampler, logits: torch.Tensor, mix: Sequence[SamplingParams], rows: int) -> None:
        """Add the requests."""
        self._sampler, self._logits, self._mix, self._rows = sampler, logits[:rows], mix, rows
        self._params = itertools.cycle([dataclasses.replace(each, seed=i) for i, each in enumerate(mix)])
        self._slots = [sampler.add_request(next(self._params)) for _ in range(rows + _OTHERS)]
        self._positions = torch.arange(rows, device=logits.device)
        self._first, self._leaving = itertools.count(), itertools.count()
        self._out = SampleOutputs(
            torch.zeros(rows, dtype=torch.int64, device=logits.device),
            torch.zeros(rows, dtype=torch.int32, device=logits.device),
        )

    def close(self) -> None:
        """Remove the requests."""
        for slot in self._slots:
            self._sampler.remove_request(slot)

    def named(self) -> Iterator[tuple[str, Step]]:
        """Each step with its name, once all of them are captured."""
        kept = self._sampler.plan(self._slots[: self._rows])
        for _ in range(4):
            self._sampler.sample(kept, self._logits, self._positions, "ring")
        self._sampler.sample(kept, self._logits, self._positions)
        for _ in range(4 * len(self._mix)):  # in every mode that a batch may need
            self._sampled(self._batch())
        self._sampler.capture_seen()
        yield "kept plan, out=", lambda: self._sampler.sample(kept, self._logits, self._positions, self._out)
        yield "kept plan, out='ring'", lambda: self._sampler.sample(kept, self._logits, self._positions, "ring")
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


def verifying_steps(sampler: Sampler, logits: torch.Tensor, requests: int) -> dict[tuple[str, str], Step]:
    """Steps that verify other numbers of drafts each time, and one that draws its drafts, by names and parameters."""
    chance, mix = random.Random(0), "k 50 + p .9"
    slots = [sampler.add_request(dataclasses.replace(*MIXES[mix], seed=i)) for i in range(requests)]
    drafts = torch.zeros(requests, WAY.width, dtype=torch.int64, device=logits.device)
    positions = torch.arange(requests, device=logits.device)
    singles = [torch.zeros(requests, dtype=dtype, device=logits.device) for dtype in _COUNTS]
    tokens = torch.zeros(requests, WAY.width + 1, dtype=torch.int64, device=logits.device)
    out = VerifyOutputs(tokens, *singles)
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

    for _ in range(2):
        known = verified(slots)
        drafted()
    sampler.capture_seen()
    return {
        ("verify, new ragged plan", mix): lambda: verified(slots),
        ("verify, other drafts of a plan", mix): again,
        (f"{WAY.width} drafts, verify, kept plan", mix): drafted,
    }
