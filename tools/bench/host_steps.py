"""The steps whose host's part is measured: of an engine over one sampler, whose tensors come back in each step."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import torch

from compiled_sampler import SampleOutputs, Sampler, SamplingParams, VerifyOutputs

MODES = ["greedy", "top_k_top_p[64]", "full"]  # that serve the batches of MIXES
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


class Steps:
    """The steps of an engine over one sampler, all of it warmed up.

    Args:
        sampler: with at least twice the rows as slots, and logits bound.
        logits: the bound buffer.
        mix: parameters that requests take in turn.
        rows: of a batch.
    """

    def __init__(self, sampler: Sampler, logits: torch.Tensor, mix: Sequence[SamplingParams], rows: int) -> None:
        """Fill every slot."""
        self._sampler, self._logits, self._mix, self._rows = sampler, logits[:rows], mix, rows
        self._params = itertools.cycle([dataclasses.replace(each, seed=i) for i, each in enumerate(mix)])
        self._slots = [sampler.add_request(next(self._params)) for _ in range(2 * rows + 128)]
        self._positions = torch.arange(rows, device=logits.device)
        self._turn = itertools.count()
        self._out = SampleOutputs(
            torch.zeros(rows, dtype=torch.int64, device=logits.device),
            torch.zeros(rows, dtype=torch.int32, device=logits.device),
        )

    def close(self) -> None:
        """Free every slot."""
        for slot in self._slots:
            self._sampler.remove_request(slot)

    def named(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Each step with its name."""
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
        first = next(self._turn) % (len(self._slots) - self._rows)
        return self._slots[first : first + self._rows]

    def _sampled(self, slots: list[int]) -> object:
        return self._sampler.sample(self._sampler.plan(slots), self._logits, self._positions, self._out)

    def _churn(self) -> object:
        place = next(self._turn) % self._rows
        self._sampler.remove_request(self._slots[place])
        self._slots[place] = self._sampler.add_request(next(self._params))
        return self._sampled(self._slots[: self._rows])


def verifications(
    sampler: Sampler, logits: torch.Tensor, requests: int, width: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Steps that plan and verify other numbers of drafts each time, with their names."""
    chance = random.Random(0)
    slots = [sampler.add_request(SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=i)) for i in range(requests)]
    drafts = torch.zeros(requests, width, dtype=torch.int64, device=logits.device)
    positions = torch.arange(requests, device=logits.device)
    singles = [torch.zeros(requests, dtype=dtype, device=logits.device) for dtype in _COUNTS]
    out = VerifyOutputs(torch.zeros(requests, width + 1, dtype=torch.int64, device=logits.device), *singles)
    counts = itertools.cycle([[chance.randint(0, width) for _ in slots] for _ in range(200)])

    def verified(planned: Sequence[int]) -> Sequence[int]:
        plan = sampler.plan(planned, num_drafts=next(counts))
        sampler.verify(plan, logits[: plan.num_rows], drafts, positions, out=out)
        return plan.slots

    def again() -> None:
        nonlocal known
        known = verified(known)

    for _ in range(2):
        known = verified(slots)
    sampler.capture_seen()
    yield "verify, new ragged plan", lambda: verified(slots)
    yield "verify, other drafts of a plan", again
