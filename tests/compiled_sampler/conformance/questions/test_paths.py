"""Comparisons of many rows: routes of ours agree, every row is counted once, and processes find what one finds."""

import math
from dataclasses import replace

import pytest
import torch

from compiled_sampler.conformance import QUICK, Bench, Outcome, Params, Semantics, ask, chosen, run
from compiled_sampler.conformance.adapters.ours import Eager
from compiled_sampler.conformance.adapters.ours_paths import PATHS, CoveringOnCpu
from compiled_sampler.conformance.processes import parallel_run
from compiled_sampler.conformance.questions.paths import sampling as paths
from compiled_sampler.conformance.questions.paths import verification
from compiled_sampler.conformance.questions.rows import hard_rows
from compiled_sampler.conformance.questions.rows.batches import Batch
from compiled_sampler.conformance.questions.rows.drafted_rows import WIDTH, drafted_rows, strays
from tests.compiled_sampler.conformance.adapters.broken_paths import PathOfOneBit
from tests.compiled_sampler.conformance.adapters.race_adapter import Race

HERE = "tests.compiled_sampler.conformance"
CPU = torch.device("cpu")


class Routes(Eager):
    """Eager torch, with the route of the covering mode as its only path."""

    def paths(self):
        return {"covering mode": CoveringOnCpu}


def asked(target, question, rows, name=None):
    (found,) = chosen([question])
    return ask(Bench(target, name, CPU, replace(QUICK, rows=rows)), found)


@pytest.mark.parametrize(("question", "names"), [("determinism.paths", 1), ("verification.paths", 3)])
def test_routes_of_ours_agree(question, names):
    result = asked(Routes, question, 2000)
    assert result.outcome is Outcome.PASSED, result
    assert len(result.counts) == names
    assert {each.compared for each in result.counts} <= {2000, 200}


def test_drafts_leave_the_stream_of_ours_alone():
    result = asked(Routes, "verification.stream", 2560)
    assert result.outcome is Outcome.PASSED, result
    assert [each.compared for each in result.counts] == [2560]


def test_processes_compare_every_row_once_and_find_one_bit(monkeypatch):
    monkeypatch.setattr(paths, "MANY_ROWS", 4000)
    result = asked(PathOfOneBit, "determinism.paths", 4000, f"{HERE}.adapters.broken_paths:PathOfOneBit")
    assert result.outcome is Outcome.FAILED, result
    (count,) = result.counts
    kinds = paths.kinds_of(Bench(PathOfOneBit, None, CPU, replace(QUICK, rows=4000)))
    assert count.compared == sum(math.ceil(4000 * share) for *_, share in kinds) in range(4000, 4000 + len(kinds))
    assert 0 < count.mismatches < 100
    assert "seed 1," in count.first


def test_questions_are_asked_in_processes_and_answered_in_order(monkeypatch):
    monkeypatch.setattr(parallel_run, "has_many_processors", lambda: True)
    names = ["determinism.twice", "determinism.paths", "determinism.replay"]
    bench = Bench(PathOfOneBit, f"{HERE}.adapters.broken_paths:PathOfOneBit", CPU, replace(QUICK, rows=1000))
    results = run(bench, chosen(names))
    assert [each.question for each in results] == names
    assert [each.outcome for each in results] == [Outcome.PASSED, Outcome.FAILED, Outcome.NOT_ASKED]
    assert results[1].detail == ask(bench, chosen(["determinism.paths"])[0]).detail


@pytest.mark.parametrize(("rows", "requests"), [(2000, 2000), (20_000, 20_000), (100_000, 20_000), (10**6, 200_000)])
def test_many_requests_have_the_rows_together_that_are_asked_for(rows, requests):
    effort = replace(QUICK, rows=rows)
    assert verification.requests_of(effort, "match") == requests
    assert verification.requests_of(effort, "block") == requests // 10


def test_shares_compare_every_request_once():
    parts = verification.parts(Bench(Race, None, CPU, replace(QUICK, rows=10_000)), "block", [("stream",)])
    bench, counts = Bench(Race, None, CPU, QUICK), {}
    for part in parts:
        counts[part.share] = sum(len(work.drafted.seeds) for work in verification.batches(bench, part))
    assert sum(counts.values()) == parts[0].rows == 1000
    assert set(counts) == set(range(hard_rows.NUM_FAMILIES))
    assert all(counts.values())


def test_paths_of_one_group_are_compared_together():
    groups = paths.groups_of(PATHS)
    assert groups[0][0] == "replayed"
    assert groups[1:] == [("captured in an outer graph",), ("compiled CPU",), ("eager CPU", "eager CPU, covering mode")]
    assert sum(map(len, groups)) == len(PATHS)


class OfGpus(PathOfOneBit):
    """Takes long to prepare on the CPU."""

    short_on = "cuda"


class TakesLong(Race):
    """Has a path that short runs on the CPU leave out."""

    def paths(self):
        return {"always": PathOfOneBit, "long": OfGpus}


@pytest.mark.parametrize(("rows", "names"), [(1000, {"always"}), (20_000, {"always"}), (100_000, {"always", "long"})])
def test_a_path_that_takes_long_is_left_to_runs_of_many_rows(rows, names):
    bench = Bench(TakesLong, None, CPU, replace(QUICK, rows=rows))
    assert set(paths.paths_of(bench, 32)) == names


def test_one_ulp_changes_the_token_of_rows_at_the_edge():
    bench = Bench(Race, None, CPU, QUICK)
    params = [Params(top_k=20)] * 200
    logits = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    batch = Batch(logits, params, bench.new_seeds(200), [0] * 200)
    moved = hard_rows.at_the_edge(bench, batch)
    changed = (moved != logits).nonzero()
    assert len(changed) == 200
    tokens = changed[:, 1]
    wins = bench.sample(*batch._replace(logits=moved)) == tokens
    other = moved.clone()
    rows = torch.arange(200)
    towards = torch.where(rows % 2 == 0, torch.inf, -torch.inf)
    other[rows, tokens] = torch.nextafter(moved[rows, tokens], towards)
    assert (bench.sample(*batch._replace(logits=other)) != bench.sample(*batch._replace(logits=moved))).all()
    assert wins.tolist() == [row % 2 == 1 for row in range(200)]


def test_keys_are_in_the_order_of_floats():
    x = torch.tensor([-3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3e38])
    keys = hard_rows._key(x)
    assert keys.tolist() == sorted(keys.tolist())
    assert hard_rows._float(keys).tolist() == x.tolist()


def test_rows_that_are_declared_to_raise_are_left_out():
    raising = Semantics(nan="raises", infinity="raises", all_masked="raises")
    rows = torch.cat([kind(torch.randn(50, 64)) for kind in hard_rows.kinds(raising)])
    assert rows.isfinite().all()
    assert len(hard_rows.kinds(Semantics())) == len(hard_rows.KINDS)


def test_drafts_of_every_drafter_are_mixed_in():
    bench = Bench(Race, None, CPU, QUICK)
    work = drafted_rows(bench, 256, 127, 5)
    drafted = work.drafted
    assert set(drafted.num_drafts) == set(range(WIDTH + 1))
    assert drafted.logits.shape == (sum(drafted.num_drafts) + 256, 127)
    assert drafted.probs.shape == (sum(drafted.num_drafts), 127)
    assert (drafted.drafts >= 127).any()
    verified = bench.verify(drafted._replace(probs=None), "match")
    assert not strays(work, verified).any()
    accepted = verified.num_accepted == torch.tensor(drafted.num_drafts)
    share = accepted[torch.tensor(drafted.num_drafts) > 3].float().mean()
    assert 0.2 < share < 0.9  # the perfect drafter, a quarter of the requests, and not all of them
    for field in ("num_emitted", "num_accepted"):
        changed = verified._replace(**{field: getattr(verified, field) + 1})
        assert strays(work, changed).all()


@pytest.mark.parametrize(("shares", "rules"), [(1, []), (5, ["match", "block"])])
def test_shares_of_many_requests_are_prepared_before_anything_is_drawn(shares, rules):
    calls = []

    class Prepared(Eager):
        def prepare(self, params, rule, width, has_laws):
            calls.append((rule, width, has_laws, {each.temperature for each in params}))

        def sample(self, *rows):
            calls.append("sample")
            return super().sample(*rows)

    bench = Bench(Prepared, None, CPU, QUICK)
    for rule in ("match", "block"):
        part = paths.Part(127, torch.float32, (), 40, shares, 0, rule)
        assert len([*verification.batches(bench, part)]) == (1 if shares == 5 else 5)
    greedy = [(rule, WIDTH, rule == "block", {0.0}) for rule in rules]  # of the first family
    assert [each for each in calls if each != "sample"] == greedy
    assert not rules or calls[0] == greedy[0]


@pytest.mark.parametrize(("rows", "kinds"), [(20_000, paths.KINDS[:2]), (100_000, paths.KINDS)])
def test_the_kinds_of_many_rows_have_them_all(rows, kinds):
    found = paths.kinds_of(Bench(Race, None, CPU, replace(QUICK, rows=rows)))
    taken = [each for each in kinds if each[1] in (torch.float32, *Race.semantics.dtypes)]
    assert [each[:2] for each in found] == [each[:2] for each in taken]
    assert sum(share for *_, share in found) == pytest.approx(1)
