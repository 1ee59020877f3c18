"""Steps that replay, and read and write in place what came back: the tokens of eager torch in any sequence of calls."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import SampleOutputs, Sampler, SamplingParams, Verification, VerifyOutputs
from graph_cache.pinned import FetchRing
from tests.builders.sampler import replay_recordings, same
from tests.tiers import tiers

V, R, S, K, MOST = 300, 5, 12, 3, 8
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
def test_a_sequence_of_calls(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the ring of what is fetched is full at times, and captures come between."""
    twins, turn = Twins(seed), FetchRing._turn
    monkeypatch.setattr(FetchRing, "_turn", lambda ring: twins.chance.random() < 0.85 and turn(ring))
    for _ in range(400):
        twins.churn()
        if not twins.held:
            continue
        kind = twins.chance.choice(
            ["sample"] * 3 + ["verify"] * 2 + ["verify, counts", "draft", "probs", "flush", "seen"]
        )
        if kind == "flush":
            for each in twins.pair:
                each.flush()
        elif kind == "seen":
            twins.pair[0].capture_seen()
        else:
            twins.backend.outer = twins.chance.random() < 0.05
            assert twins.call(kind), kind
            twins.backend.outer = False
    assert twins.pair[0].statistics().replays > 200


# Tensors that come back.


PARAMS = [
    SamplingParams(seed=1, temperature=0.0),
    SamplingParams(seed=2, top_k=20, top_p=0.9),
    SamplingParams(seed=3),
    SamplingParams(seed=4, min_p=0.1),
    SamplingParams(seed=5, top_p=0.8),
    SamplingParams(seed=6, top_k=40),
]
BACKENDS = ["recorded", pytest.param("cuda", marks=pytest.mark.gpu)]


def holding(device: str, backend: str) -> Sampler:
    made = Sampler(V, 8, device, backend=backend, buckets=[2, 8], verifications=[Verification("match", K)])
    for params in PARAMS:
        made.add_request(params)
    return made


@pytest.fixture(scope="module", params=BACKENDS)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    """Replays graphs, on the CPU recorded ones."""
    if request.param == "cuda":
        made = holding("cuda", "graph")
    else:
        made = holding("cpu", "eager")
        replay_recordings(made)
    made.warmup(modes=["full"])
    return made


@pytest.fixture
def reference() -> Sampler:
    return holding("cpu", "eager")


_HELD: list[object] = []
"""Tensors whose addresses must not come back in another test of the same sampler."""


def normal(rows: int, seed: int) -> Tensor:
    return 3.0 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def served_in_place(sampler: Sampler) -> int:
    return sum(count for name, count in sampler.statistics().coverage.items() if "seen with" in name)


@pytest.mark.parametrize("slots", [[0, 1, 2, 3, 4], [5, -1, 2, 2, 0], [1, 1]], ids=str)
def test_steps_in_place_draw_the_same_tokens(sampler, reference, slots):
    rows, device = len(slots), sampler.device
    logits, positions = normal(rows, 0).to(device), torch.arange(rows, device=device)
    out = SampleOutputs(torch.zeros_like(positions), torch.zeros(rows, dtype=torch.int32, device=device))
    _HELD.append((logits, positions, out))
    plans = [sampler.plan(each, "full") for each in (slots, slots[::-1])]
    wanted = [reference.plan(each, "full") for each in (slots, slots[::-1])]
    for step in range(6):
        if step == 2:
            assert sampler.capture_seen() == 1
        before = served_in_place(sampler)
        logits.copy_(normal(rows, step))
        positions.add_(1)
        which = step % 2 if step < 4 else 1
        found = sampler.sample(plans[which], logits, positions, out)
        assert found is out
        assert same(found, reference.sample(wanted[which], logits.cpu(), positions.cpu()))
        assert served_in_place(sampler) - before == (step >= 2)


def test_other_tensors_between_steps_in_place(sampler, reference):
    device = sampler.device
    logits, positions = normal(R, 0).to(device), torch.arange(R, device=device)
    plan, wanted = sampler.plan(range(R), "full"), reference.plan(range(R), "full")
    for _ in range(2):
        sampler.sample(plan, logits, positions)
    sampler.capture_seen()
    for seed in range(4):
        other = normal(R, seed).to(device) if seed % 2 else logits.copy_(normal(R, seed))
        assert same(sampler.sample(plan, other, positions), reference.sample(wanted, other.cpu(), positions.cpu()))


@pytest.mark.parametrize("bound", [True, False], ids=["bound logits", "free logits"])
def test_ragged_verifications_in_place_give_the_same_tokens(sampler, reference, bound):
    device = sampler.device
    buffer, drafts = normal(R * (K + 1), 0).to(device), torch.randint(0, V, (R, K), device=device)
    positions = torch.arange(R, device=device)
    singles = [torch.zeros(R, dtype=dtype, device=device) for dtype in (*[torch.int64] * 3, torch.int32)]
    out = VerifyOutputs(torch.zeros(R, K + 1, dtype=torch.int64, device=device), *singles)
    if bound:
        sampler.bind_logits(buffer)
        sampler.warmup(modes=["full"])
    for step in range(6):
        counts = [(step + n) % (K + 1) for n in range(R)] if bound or step % 2 else [K] * R
        plans = [each.plan(range(R), "full", counts) for each in (sampler, reference)]
        buffer.copy_(normal(R * (K + 1), step))
        rows = buffer[: plans[0].num_rows]
        drafts.copy_(torch.randint(0, V, (R, K)))
        found = sampler.verify(plans[0], rows, drafts, positions, out=out)
        assert same(found, reference.verify(plans[1], rows.cpu(), drafts.cpu(), positions.cpu()))
        if step == 2:
            assert sampler.capture_seen() >= 1
    assert served_in_place(sampler) > 0
    sampler.bind_logits(None)


@pytest.mark.gpu
def test_an_engine_captures_a_plan_that_no_step_has_used(reference):
    sampler = holding("cuda", "graph")
    sampler.warmup(modes=["full"])
    logits, positions = normal(R, 0).cuda(), torch.arange(R, device="cuda")
    plan = sampler.plan(range(R), "full")
    sampler.plan([0, 1], "full")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sampler.sample(plan, logits, positions)
    for seed in range(3):
        logits.copy_(normal(R, seed))
        junk = [torch.full((64,), -7, device="cuda") for _ in range(64)]
        graph.replay()
        assert same(drawn, reference.sample(reference.plan(range(R), "full"), logits.cpu(), positions.cpu()))
        del junk
    assert torch.equal(plan.slot_ids.cpu(), torch.arange(R))


def test_a_wrong_progress_is_refused(sampler):
    with pytest.raises(TypeError, match="progress must be callable"):
        sampler.capture_seen(progress=5)
    done: list[tuple[int, int, str]] = []
    report: Callable[[int, int, str], object] = lambda *what: done.append(what)  # noqa: E731
    assert sampler.capture_seen(report) == len(done)
