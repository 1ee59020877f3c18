"""Steps that replay: the tokens of eager torch in any sequence of calls."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams, Verification
from tests.builders.sampler import replay_recordings, same
from tests.tiers import tiers

V, S, K, MOST = 300, 12, 3, 8
RULES = "match", "rejection"


def new_sampler() -> Sampler:
    """Eager, for all that a sequence calls."""
    ways = [Verification(rule, K) for rule in RULES]
    return Sampler(V, S, backend="eager", buckets=[2, 4, 8], verifications=ways, probabilities=True, history_len=16)


class Twins:
    """Two samplers that get the same calls; the first one replays recordings.

    Args:
        seed: of the sequence.
    """

    def __init__(self, seed: int) -> None:
        """Hold no request."""
        self.chance, self.held, self.pair = random.Random(seed), list[int](), (new_sampler(), new_sampler())
        self.backend = replay_recordings(self.pair[0])
        self.pair[0].warmup(modes=["full"])
        make, sizes = torch.Generator().manual_seed(seed), range(1, MOST + 1)
        self.logits = {n: torch.randn(n * (K + 1), V, generator=make) for n in sizes}
        self.drafts = {n: torch.randint(V, (n, K), generator=make) for n in sizes}
        self.positions = {n: torch.arange(n) for n in sizes}
        self.buffers = {n: torch.zeros(n, dtype=torch.int64) for n in sizes}
        self.counts = {n: torch.zeros(n, dtype=torch.int64) for n in sizes}

    def churn(self) -> None:
        """Some requests leave, and others come."""
        chance = self.chance
        for _ in range(min(len(self.held), chance.choice([0, 0, 0, 1, 1, 3, 6]))):
            slot = self.held.pop(chance.randrange(len(self.held)))
            for each in self.pair:
                each.remove_request(slot)
        for _ in range(min(S - len(self.held), chance.choice([0, 0, 1, 1, 2, 5, 8]))):
            choices = {"temperature": [0.0, 0.7, 1.3], "top_k": [0, 5], "min_p": [0.0, 0.3]}
            drawn: dict[str, Any] = {name: chance.choice(values) for name, values in choices.items()}
            params = SamplingParams(**drawn, seed=chance.randrange(2**64))
            slots = {each.add_request(params) for each in self.pair}
            self.held += slots
            assert len(slots) == 1

    def call(self, of: str) -> bool:
        """Whether both return the same from a call for some of the requests."""
        chance = self.chance
        slots = chance.sample(self.held, chance.randint(1, min(MOST, len(self.held))))
        rows, counts = len(slots), [chance.randint(0, K) for _ in slots]
        self.buffers[rows].copy_(torch.tensor(slots))
        self.counts[rows].copy_(torch.tensor(counts))
        rule, replaced = chance.choice(RULES), chance.random() < 0.4

        def made(sampler: Sampler) -> Any:
            drafts = {"num_drafts": counts} if of.startswith("verify") else {}
            plan = sampler.plan(slots, mode="full", **drafts)
            if replaced and of != "verify, counts":
                plan = dataclasses.replace(plan, slot_ids=self.buffers[rows])
            if of == "verify, counts":
                plan = dataclasses.replace(plan, draft_counts=self.counts[rows])
            logits, positions = self.logits[rows][: plan.num_rows], self.positions[rows]
            calls: dict[str, Callable[[], Any]] = {
                "sample": lambda: sampler.sample(plan, logits, positions),
                "draft": lambda: (sampler.draft(plan, logits, positions).token_ids,),
                "probs": lambda: (sampler.probs(plan, logits),),
                "verify": lambda: sampler.verify(plan, logits, self.drafts[rows], positions, rule),
            }
            return calls[of.split(",")[0]]()

        return same(*map(made, self.pair))


@pytest.mark.parametrize("seed", tiers([0], range(3)))
def test_a_sequence_of_calls(seed: int) -> None:
    twins = Twins(seed)
    for _ in range(400):
        twins.churn()
        if not twins.held:
            continue
        kind = twins.chance.choice(["sample"] * 3 + ["verify"] * 2 + ["verify, counts", "draft", "probs", "flush"])
        if kind == "flush":
            for each in twins.pair:
                each.flush()
        else:
            twins.backend.outer = twins.chance.random() < 0.05
            assert twins.call(kind), kind
            twins.backend.outer = False
    assert twins.pair[0].statistics().replays > 200
