"""Paths of ours: what says that it replays does, and captured steps serve the requests of each call."""

import contextlib
import functools
from collections import Counter
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from compiled_sampler import SampleOutputs, Sampler, VerifyOutputs
from compiled_sampler.batch import tensors_of
from compiled_sampler.conformance import QUICK, Bench, ours
from compiled_sampler.conformance.ours import (
    PATHS,
    CapturedStep,
    CapturedVerification,
    Compiled,
    EagerOnCpu,
    served_by_graphs,
)
from compiled_sampler.conformance.rows import committed, drafted_rows, mixed_batch

Outputs = SampleOutputs | VerifyOutputs


@pytest.mark.parametrize(("replays", "direct_runs"), [(3, 0), (0, 0), (0, 2), (5, 1)])
def test_a_call_that_no_graph_served_is_an_error(replays, direct_runs):
    counts = Counter(replays=7, direct_runs=7)
    sampler = SimpleNamespace(statistics=lambda: SimpleNamespace(**counts))
    message = f"got {replays} replays and {direct_runs} direct runs"
    is_right = (replays, direct_runs) == (3, 0)
    with (
        contextlib.nullcontext() if is_right else pytest.raises(RuntimeError, match=message),
        served_by_graphs(sampler),
    ):
        counts.update(replays=replays, direct_runs=direct_runs)


class Repeats:
    """In place of a CUDA graph: a replay makes the call again that stood in the capture, into the same results."""

    calls: ClassVar[list[tuple[functools.partial[Outputs], Outputs]]] = []

    def replay(self):
        again, results = self.calls[-1]
        for old, new in zip(tensors_of(results), tensors_of(again()), strict=True):
            old.copy_(new)


@pytest.fixture
def sampler(monkeypatch):
    """Eager torch, whose calls a capture repeats."""
    made = Sampler(127, 4000, backend="eager")

    def recorded(call, *args, **options):
        again = functools.partial(call, *args, **options)
        Repeats.calls.append((again, again()))
        return Repeats.calls[-1][1]

    for name in ("sample", "verify"):
        monkeypatch.setattr(made, name, functools.partial(recorded, getattr(made, name)))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Repeats)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    yield made
    Repeats.calls.clear()


@pytest.fixture
def bench():
    return Bench(EagerOnCpu, None, torch.device("cpu"), QUICK)


def test_a_captured_step_draws_for_the_requests_of_each_call(sampler, bench):
    batches = [mixed_batch(bench, 40, 127, families) for families in (5, 1, 3)]
    first = batches[0]
    step = CapturedStep(sampler, first.logits, torch.tensor(first.positions))
    for batch in (*batches, batches[1]):
        found = step(batch.logits, batch.params, batch.seeds, torch.tensor(batch.positions))
        assert found.tolist() == bench.sample(*batch).tolist()
    held = len({*zip(batches[1].params, batches[1].seeds, strict=True)})
    assert sampler.num_free_slots == 4000 - held


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_captured_verification_commits_for_the_requests_of_each_call(rule, sampler, bench):
    works = [drafted_rows(bench, 32, 127, families).drafted for families in (5, 2)]
    asked = [each._replace(probs=None) if rule == "match" else each for each in works]
    step = CapturedVerification(sampler, asked[0], rule)
    for each in (*asked, asked[0]):
        assert torch.equal(committed(step(each)), committed(bench.verify(each, rule)))
    assert sampler.num_free_slots == 4000


def test_replays_are_warmed_up_for_the_mode_of_each_batch_once(bench, monkeypatch):
    warmed = []
    monkeypatch.setattr(Sampler, "warmup", lambda self, progress=None, modes=None: warmed.extend(modes))
    monkeypatch.setattr(ours, "served_by_graphs", lambda sampler: contextlib.nullcontext())
    monkeypatch.setattr(ours.Replayed, "backend", "eager")
    monkeypatch.setattr(ours.Replayed, "place", "cpu")
    path = ours.Replayed(127, torch.device("cpu"))
    for families in (1, 5, 5):
        batch = mixed_batch(bench, 300, 127, families)
        found = path.sample(batch.logits, batch.params, batch.seeds, torch.tensor(batch.positions))
        assert torch.equal(found, bench.sample(*batch))
        drafted = drafted_rows(bench, 8, 127, families).drafted._replace(probs=None)
        assert torch.equal(committed(path.verify(drafted, "match")), committed(bench.verify(drafted, "match")))
    assert warmed == ["greedy", "greedy", "full", "full"]


def test_every_path_but_its_own_is_named():
    names = {name for name, each in PATHS.items() if each.place == "cpu" or torch.cuda.is_available()}
    assert set(EagerOnCpu(32, torch.device("cpu")).paths()) == names - {"eager CPU"}
    assert set(Compiled(32, torch.device("cpu")).paths()) == names - {"compiled CPU"}
