"""Steps that replay, on recordings: the tokens of new calls, in any sequence of them, and captures that come late."""

import dataclasses
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams, Verification
from tests.builders.sampler import emptied, replay_recordings, same
from tests.graph_cache.recorded import RecordingBackend
from tests.tiers import tiers

V, S, K, MOST = 300, 12, 3, 8
RULES = "match", "rejection"
PARAMS: dict[str, list[Any]] = {
    "temperature": [0.0, 0.7, 1.3],
    "top_k": [0, 5],
    "top_p": [1.0, 0.8],
    "min_p": [0.0, 0.3],
    "logit_bias": [None, None, {7: 9.0}],
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[:, :V],
    "wider": lambda x: x,
    "strided": lambda x: x.expand(2, -1, -1).transpose(0, 1).clone().flatten(0, 1)[::2, :V],
    "requires grad": lambda x: x[:, :V].clone().requires_grad_(),
}
"""Of logits, each in memory of its own but for the first two."""


def new_sampler(cached: bool) -> Sampler:
    """Eager, for all that a sequence calls."""
    ways = [Verification(rule, K) for rule in RULES]
    options = {"verifications": ways, "probabilities": True, "history_len": 16, "draft_cache_len": K * cached}
    return Sampler(V, S, backend="eager", buckets=[2, 4, 8], captured_edits=[["logit_bias"]], **options)


class Twins:
    """Two samplers that get the same calls; the first one replays recordings, and the other one forgets each call."""

    def __init__(self, seed: int) -> None:
        self.chance, self.held, self.pair = random.Random(seed), list[int](), (new_sampler(True), new_sampler(False))
        self.backend = replay_recordings(self.pair[0])
        self.pair[0].warmup(modes=["full"])
        make, sizes = torch.Generator().manual_seed(seed), range(1, MOST + 1)
        wide = {n: torch.randn(n * (K + 1), V + 5, generator=make) for n in sizes}
        self.logits = {(name, n): of(wide[n]) for name, of in LAYOUTS.items() for n in sizes}
        self.drafts = {n: torch.randint(V, (n, K), generator=make) for n in sizes}
        self.positions = {(step, n): torch.arange(step * n)[::step] for step in (1, 2) for n in sizes}
        self.buffers = {n: torch.zeros(n, dtype=torch.int64) for n in sizes}
        self.counts = {n: torch.zeros(n, dtype=torch.int64) for n in sizes}
        self.masks = {n: torch.full((n * (K + 1), -(-V // 32)), 0b1010, dtype=torch.int32) for n in sizes}
        self.outs: dict[Any, Any] = {}

    def churn(self) -> None:
        chance = self.chance
        for _ in range(min(len(self.held), chance.choice([0, 0, 0, 1, 1, 3, 6]))):
            slot = self.held.pop(chance.randrange(len(self.held)))
            for each in self.pair:
                each.remove_request(slot)
        for _ in range(min(S - len(self.held), chance.choice([0, 0, 1, 1, 2, 5, 8]))):
            drawn = {name: chance.choice(values) for name, values in PARAMS.items()}
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
        rule, replaced, mode = chance.choice(RULES), chance.random() < 0.4, chance.choice(["full", "full", None])
        logits, positions = self.logits[chance.choice([*LAYOUTS]), rows], self.positions[chance.choice([1, 2]), rows]
        with torch.no_grad():
            logits.normal_()
        masked, into, coupled, offset = (chance.random() < share for share in (0.3, 0.5, 0.5, 0.5))
        has_counts = of == "verify, counts" or (of.startswith("draft") and coupled)

        def made(sampler: Sampler) -> Any:
            plan = sampler.plan(slots, mode, **({"num_drafts": counts} if "verify" in of or has_counts else {}))
            if replaced and of != "verify, counts":
                plan = dataclasses.replace(plan, slot_ids=self.buffers[rows])
            if has_counts:
                plan = dataclasses.replace(plan, draft_counts=self.counts[rows])
            x = logits[: rows if of == "draft" else plan.num_rows]
            mask = {"token_bitmask": self.masks[rows][: len(x)]} if masked else {}
            calls: dict[str, Callable[..., Any]] = {
                "sample": lambda **out: sampler.sample(plan, x, positions, **mask, **out),
                "draft": lambda: sampler.draft(plan, x, positions, coupled, int(offset), **mask).drawn,
                "probs": lambda: (sampler.probs(plan, x, **mask),),
                "verify": lambda **out: sampler.verify(plan, x, self.drafts[rows], positions, rule, **mask, **out),
            }
            name = of.split(",")[0]
            drawn = calls[name]()
            if not into or name not in ("sample", "verify") or sampler is self.pair[1]:
                return drawn
            key = name, rows, plan.width if name == "verify" else 0, drawn.finished is None
            out = self.outs.setdefault(key, emptied(drawn))
            assert calls[name](out=out) is out
            return out

        found, wanted = map(made, self.pair)
        self.pair[1]._calls._launches.clear()
        return same(found, wanted)


@pytest.mark.parametrize("seed", tiers([0], range(3)))
def test_a_sequence_of_calls(seed: int) -> None:
    twins = Twins(seed)
    for _ in range(400):
        twins.churn()
        if not twins.held:
            continue
        kinds = ["sample"] * 3 + ["verify"] * 2 + ["draft"] * 3 + ["verify, counts", "probs", "flush"]
        kind = twins.chance.choice(kinds)
        if kind == "flush":
            for each in twins.pair:
                each.flush()
        else:
            twins.backend.outer = twins.chance.random() < 0.05
            assert twins.call(kind), kind
            twins.backend.outer = False
    assert twins.pair[0].statistics().replays > 200


# Captured when batches come, after a warm-up that did not wait.


class Late:
    """A sampler whose stages are all compiled, and what it captures."""

    def __init__(self) -> None:
        self.sampler = Sampler(V, 4, backend="eager", buckets=[2, 4])
        self.backend: RecordingBackend = replay_recordings(self.sampler)
        stages: Any = SimpleNamespace(are_settled=True, status=lambda: None, compares=False, lacks_kernels=False)
        runner: Any = self.sampler._runner
        runner._compile = lambda *_, **__: None
        runner._stages = stages
        self.sampler.warmup(modes=["greedy"], wait=False)
        self.logits, self.positions = torch.randn(2, V), torch.tensor([3, 4])
        self.plan = self.sampler.plan([self.sampler.add_request(SamplingParams(temperature=0.0)) for _ in range(2)])

    def captures_after(self, steps: int) -> int:
        for _ in range(steps):
            drawn = self.sampler.sample(self.plan, self.logits, self.positions)
            assert drawn.tolist() == self.logits.argmax(-1).tolist()
        return self.backend.num_captures


@pytest.fixture
def late() -> Late:
    return Late()


def test_a_batch_is_captured_when_it_comes(late):
    assert late.captures_after(2) == 1
    assert late.captures_after(3) == 1


def test_a_warmup_of_other_modes_that_waits_leaves_late_captures_on(late):
    late.sampler.warmup(modes=())
    assert late.captures_after(2) == 1


def test_a_warmup_captures_nothing_where_torch_stands_in_for_kernels(late):
    late.sampler._runner._stages.lacks_kernels = True
    late.sampler.warmup(modes=["greedy"])
    assert late.backend.num_captures == 0
    late.sampler._runner._stages.lacks_kernels = False
    late.sampler.warmup(modes=["greedy"])
    assert late.backend.num_captures == 2


def test_a_capture_that_fails_once_is_tried_again(late):
    late.backend.failures = [torch.OutOfMemoryError("planted")]
    assert late.captures_after(3) == 1


def test_a_capture_that_always_fails_is_given_up_until_the_next_warmup(late, caplog):
    late.backend.failures = [RuntimeError("planted") for _ in range(5)]
    assert late.captures_after(6) == 0
    assert len(late.backend.failures) == 3
    assert caplog.text.count("runs without a graph") == 1
    late.backend.failures.clear()
    late.sampler.warmup(modes=["greedy"], wait=False)
    assert late.captures_after(2) == 1


def test_ranks_of_a_shard_capture_nothing_late(late, monkeypatch):
    """Each was settled in its own time, so the collectives of one rank's capture met the next step's of another."""
    monkeypatch.setattr(late.sampler._runner, "_late", None)
    monkeypatch.setattr(late.sampler._runner, "_shard", object())
    late.sampler.warmup(modes=["greedy"], wait=False)
    assert late.captures_after(3) == 0


def test_a_call_that_ran_before_the_warmup_is_captured_after_it(late):
    late.sampler._runner._late = None
    assert late.captures_after(2) == 0
    late.sampler.warmup(modes=["greedy"], wait=False)
    assert late.captures_after(2) == 1


def test_steps_before_a_late_capture_are_counted_too(late):
    late.sampler._runner._stages.are_settled = False
    late.captures_after(3)
    late.sampler._runner._stages.are_settled = True
    assert late.captures_after(4) == 1
    counted = late.sampler.statistics()
    assert (counted.direct_runs, counted.replays) == (4, 3)
    assert counted.fallbacks == {"greedy rows=2: no variant": 4}
