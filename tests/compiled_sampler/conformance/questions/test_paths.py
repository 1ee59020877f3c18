"""Comparisons of many rows: routes of ours agree, replays serve every call, each row and request is compared once."""

import contextlib
import functools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from compiled_sampler import Sampler
from compiled_sampler.batch import tensors_of
from compiled_sampler.conformance import QUICK, Bench, Outcome, Params, Semantics, ask, chosen, ours, rows
from compiled_sampler.conformance.ours import (
    PATHS,
    CapturedStep,
    CapturedVerification,
    Compiled,
    Eager,
    served_by_graphs,
)
from compiled_sampler.conformance.questions import paths
from compiled_sampler.conformance.rows import NUM_FAMILIES, Batch, committed, drafted_rows, mixed_batch, strays
from tests.compiled_sampler.conformance.adapters.broken_adapters import PathOfOneBit
from tests.compiled_sampler.conformance.adapters.race_adapter import Race

CPU = torch.device("cpu")


class Routes(Eager):
    """Eager torch, with the route of the covering mode as its only path."""

    def paths(self):
        return {"covering mode": PATHS["eager CPU, covering mode"]}


def bench_of(target, num_rows=QUICK.rows):
    return Bench(target, None, CPU, replace(QUICK, rows=num_rows))


def asked(target, name, num_rows):
    return ask(bench_of(target, num_rows), *chosen([name]))


@pytest.mark.parametrize(
    ("question", "names"), [("determinism.paths", 1), ("verification.paths", 3), ("verification.stream", 1)]
)
def test_routes_of_ours_agree(question, names):
    result = asked(Routes, question, 2560)
    assert result.outcome is Outcome.PASSED, result
    assert len(result.counts) == names
    assert {each.compared for each in result.counts} <= {2560, 256}


def test_one_bit_is_found_among_rows_of_every_kind_each_compared_once(monkeypatch):
    monkeypatch.setattr(paths, "MANY_ROWS", 4000)
    result = asked(PathOfOneBit, "determinism.paths", 4000)
    assert result.outcome is Outcome.FAILED, result
    (count,) = result.counts
    kinds = paths.kinds_of(bench_of(PathOfOneBit, 4000))
    assert count.compared == sum(num_rows for *_, num_rows in kinds) in range(4000, 4000 + len(kinds))
    assert 0 < count.mismatches < 100
    assert "seed 1," in count.first


def test_requests_of_every_family_are_compared_once():
    works = [*paths.works(bench_of(Race, 10_000), "block")]
    assert sum(len(drafted.seeds) for drafted, _ in works) == 1000
    assert len(works) == NUM_FAMILIES
    assert {each.temperature for each in works[0][0].params} == {0.0}


class OfGpus(PathOfOneBit):
    """Takes long to prepare on the CPU."""

    short_on = "cuda"


class TakesLong(Race):
    """Has a path that short runs on the CPU leave out."""

    def paths(self):
        return {"always": PathOfOneBit, "long": OfGpus}


@pytest.mark.parametrize(
    ("num_rows", "names", "kinds"),
    [(20_000, {"always"}, paths.KINDS[:2]), (100_000, {"always", "long"}, paths.KINDS)],
)
def test_paths_that_take_long_and_further_kinds_are_left_to_runs_of_many_rows(num_rows, names, kinds):
    assert set(paths.paths_of(bench_of(TakesLong, num_rows), 32)) == names
    found = paths.kinds_of(bench_of(Race, num_rows))
    assert [each[:2] for each in found] == [each[:2] for each in kinds]
    assert num_rows <= sum(each[2] for each in found) < num_rows + len(kinds)


def test_one_ulp_changes_the_token_of_rows_at_the_edge():
    bench = bench_of(Race)
    params = [Params(top_k=20)] * 200
    logits = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    batch = Batch(logits, params, bench.new_seeds(200), [0] * 200)
    moved = rows.at_the_edge(bench, batch)
    changed = (moved != logits).nonzero()
    assert len(changed) == 200
    tokens = changed[:, 1]
    wins = bench.sample(*batch._replace(logits=moved)) == tokens
    other = moved.clone()
    numbers = torch.arange(200)
    towards = torch.where(numbers % 2 == 0, torch.inf, -torch.inf)
    other[numbers, tokens] = torch.nextafter(moved[numbers, tokens], towards)
    assert (bench.sample(*batch._replace(logits=other)) != bench.sample(*batch._replace(logits=moved))).all()
    assert wins.tolist() == [row % 2 == 1 for row in range(200)]


def test_rows_that_are_declared_to_raise_are_left_out():
    raising = Semantics(nan="raises", infinity="raises", all_masked="raises")
    finite = torch.cat([kind(torch.randn(50, 64)) for kind in rows.kinds(raising)])
    assert finite.isfinite().all()
    assert len(rows.kinds(Semantics())) == len(rows.KINDS)


def test_drafts_of_every_drafter_are_mixed_in():
    bench = bench_of(Race)
    drafted, own = drafted_rows(bench, 256, 127, 5)
    assert set(drafted.num_drafts) == set(range(rows.WIDTH + 1))
    assert drafted.logits.shape == (sum(drafted.num_drafts) + 256, 127)
    assert drafted.probs.shape == (sum(drafted.num_drafts), 127)
    assert (drafted.drafts >= 127).any()
    verified = bench.verify(drafted._replace(probs=None), "match")
    assert not strays(drafted, own, verified).any()
    accepted = verified.num_accepted == torch.tensor(drafted.num_drafts)
    share = accepted[torch.tensor(drafted.num_drafts) > 3].float().mean()
    assert 0.2 < share < 0.9  # the perfect drafter, a quarter of the requests, and not all of them
    for field in ("num_emitted", "num_accepted"):
        changed = verified._replace(**{field: getattr(verified, field) + 1})
        assert strays(drafted, own, changed).all()


@pytest.mark.parametrize(("replays", "direct_runs"), [(0, 0), (0, 2), (5, 1), (3, 0)])
def test_a_call_that_no_graph_served_is_an_error(replays, direct_runs):
    counts = Counter(replays=7, direct_runs=7)
    sampler = SimpleNamespace(statistics=lambda: SimpleNamespace(**counts))
    error = pytest.raises(RuntimeError, match=f"got {replays} replays and {direct_runs} direct runs")
    with contextlib.nullcontext() if replays == 3 else error, served_by_graphs(sampler):
        counts.update(replays=replays, direct_runs=direct_runs)


class Repeats:
    """In place of a CUDA graph: a replay makes the call again that stood in the capture, into the same results."""

    calls: ClassVar = []

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
    return bench_of(Eager)


def test_a_captured_step_draws_for_the_requests_of_each_call(sampler, bench):
    batches = [mixed_batch(bench, 40, 127, families) for families in (5, 1, 3)]
    first = batches[0]
    step = CapturedStep(sampler, first.logits, torch.tensor(first.positions))
    for batch in (*batches, batches[1]):
        found = step(batch.logits, batch.params, batch.seeds, torch.tensor(batch.positions))
        assert found.token_ids.tolist() == bench.sample(*batch).tolist()
    held = len({*zip(batches[1].params, batches[1].seeds, strict=True)})
    assert sampler.num_free_slots == 4000 - held


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_captured_verification_commits_for_the_requests_of_each_call(rule, sampler, bench):
    works = [drafted_rows(bench, 32, 127, families)[0] for families in (5, 2)]
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
    path = ours.Replayed(127, CPU)
    for families in (1, 5, 5):
        batch = mixed_batch(bench, 300, 127, families)
        found = path.sample(batch.logits, batch.params, batch.seeds, torch.tensor(batch.positions))
        assert torch.equal(found, bench.sample(*batch))
        drafted = drafted_rows(bench, 8, 127, families)[0]._replace(probs=None)
        assert torch.equal(committed(path.verify(drafted, "match")), committed(bench.verify(drafted, "match")))
    assert warmed == ["greedy", "greedy", "full", "full"]


def test_every_path_but_its_own_is_named():
    names = {name for name, each in PATHS.items() if each.place == "cpu" or torch.cuda.is_available()}
    assert set(Eager(32, CPU).paths()) == names - {"eager CPU"}
    assert set(Compiled(32, CPU).paths()) == names - {"compiled CPU"}
