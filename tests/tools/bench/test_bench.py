"""The benchmark: targets and baselines are what they claim, a wrong answer is never timed, cells are read back."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from compiled_sampler import Sampler
from compiled_sampler.batch import tensors_of
from compiled_sampler.modes import mode_table, uncovered
from tests.oracles.goodness_of_fit import accept, chi_square, detects
from tools.bench import __main__ as bench
from tools.bench import baselines, runs
from tools.bench.batches import Batch, WrongAnswer, check, eager, sampling_batch, tune, verification_batch
from tools.bench.cases import CASES, NUM_DRAFTS, TARGET_DTYPE, TARGET_VOCAB_SIZE, VERIFY_CASES
from tools.bench.cells import (
    Cell,
    Peer,
    Peers,
    cells_of,
    content_of,
    merged,
    stored,
    stored_peers,
    tables_of,
    with_peers,
)
from tools.bench.floors import Rates
from tools.bench.runs import baseline_time
from tools.bench.sharded import table_of

CPU, V, DRAWS = torch.device("cpu"), 1000, 10_000
TINY = ["--device", "cpu", "--backend", "eager", "--vocab", str(V)]


def batch_of(case, requests):
    if case.rule:
        return verification_batch("peaked", requests, case.num_drafts, V, CPU, torch.float32)
    return sampling_batch(case.distribution, requests, V, CPU, torch.float32)


def planned(case):
    """A sampler and its plan for a row of a case."""
    sampler = Sampler(V, 1, backend="eager")
    return sampler, sampler.plan([sampler.add_request(case.params)])


def mode_of(case):
    return planned(case)[1].mode


def test_drafts_are_drawn_from_what_is_said_and_some_are_rejected():
    case = VERIFY_CASES["rejection by probabilities, no_filter"]
    batch = batch_of(case, 64)
    assert batch.draft_probs is not None
    torch.testing.assert_close(batch.draft_probs.sum(-1), torch.ones(64 * NUM_DRAFTS))
    accepted = eager(case, mode_of(case), batch)[2]
    assert set(accepted.tolist()) >= {0, NUM_DRAFTS}


@pytest.mark.parametrize("case", [CASES["greedy"], CASES["p .9"], *VERIFY_CASES.values()], ids=lambda case: case.name)
def test_any_wrong_field_of_any_request_is_noticed(case):
    batch = batch_of(case, 4)
    mode = mode_of(case)
    results = [eager(case, mode, part) for part in batch.split(2)]
    check(case, mode, batch, results)
    for field in range(len(tensors_of(results[0]))):
        wrong = [each.clone() for each in tensors_of(results[1])]
        wrong[field].view(-1)[-1] += 1
        with pytest.raises(WrongAnswer, match="1 of 4 requests differ from eager torch, the first is 3"):
            check(case, mode, batch, [results[0], tuple(wrong)])
    with pytest.raises(WrongAnswer, match="shapes"):
        check(case, mode, batch, results[:1])


def test_a_run_ends_at_a_wrong_answer_and_reports_nothing(monkeypatch):
    right = runs.served

    def wrong(*arguments):
        made = right(*arguments)
        return made._replace(token_ids=(made.token_ids + 1) % V)

    monkeypatch.setattr(runs, "served", wrong)
    seen = []
    options = bench.parse([*TINY, "--rows", "2", "--cases", "greedy"])
    with pytest.raises(WrongAnswer):
        runs.run(options, seen.append)
    assert seen == []


def test_every_case_can_be_tuned_and_a_verification_be_set_against_sampling():
    one = runs.Bench(CPU, V, torch.float32, Rates(1.0, None, {}), backend="eager")
    for slot, case in enumerate([*CASES.values(), *VERIFY_CASES.values()]):
        tune(one.sampler, slot, case, 2)
    case = VERIFY_CASES["match, no_filter"]
    assert one._sampler_us(case, 2, batch_of(case, 4)) > 0


def test_every_mode_serves_a_case():
    modes = mode_table(TARGET_VOCAB_SIZE, "top_k")
    served = [next(mode for mode in modes if uncovered(mode, case.params) is None) for case in CASES.values()]
    assert {mode.name for mode in served} == {mode.name for mode in modes}


@pytest.mark.full
def test_a_tiny_run_measures_prints_and_stores(tmp_path, capsys):
    stored_in = ["--json", str(tmp_path / "bench.json")]
    bench.main([*TINY, *stored_in, "--rows", "2", "--cases", "greedy", "p .99", "--baselines"])
    later = ["--append", "--cases", "greedy", "--rows", "1", "--verify", "--requests", "1", "--dtype", "bfloat16"]
    bench.main([*TINY, *stored_in, *later])
    cells = cells_of(json.loads((tmp_path / "bench.json").read_text()))
    assert [(cell.case, cell.rows, cell.dtype, cell.distribution) for cell in cells[:3]] == [
        ("greedy", 2, "float32", "peaked"),
        ("p .99", 2, "float32", "flat"),
        ("greedy", 1, "bfloat16", "peaked"),
    ]
    assert {cell.case for cell in cells if cell.num_drafts} == set(VERIFY_CASES)
    assert all(cell.us > 0 and cell.eager_us and cell.floor_kind == "bytes" for cell in cells)
    assert cells[0].baselines["torch.argmax"] > 0
    assert "x slower" in capsys.readouterr().out


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_baselines_draw_from_the_same_law(case):
    row = batch_of(case, 1).logits
    sampler, plan = planned(case)
    wanted, batch = sampler.probs(plan, row)[0], Batch(row.expand(DRAWS, V), torch.arange(DRAWS))
    found = {name: each for name, each in baselines.baselines_of(case).items() if not isinstance(each, str)}
    assert found
    for name, function in found.items():
        eager = "compile" in name  # compiled for each shape, which takes half a minute
        tokens = baselines.filtered_race(case.params, batch.logits) if eager else function(batch)
        accept(chi_square(np.bincount(tokens, minlength=V), wanted))
        detects(chi_square(np.bincount((tokens + 1) % V, minlength=V), wanted))


@pytest.mark.parametrize("one_hot", [True, False])
def test_the_torch_verifier_accepts_what_the_target_drew_and_rejects_what_it_cannot(one_hot):
    params = dataclasses.replace(VERIFY_CASES["match, k 50 + p .9"].params, top_k=2, top_p=1.0)
    logits = torch.full((8, V), -20.0)
    logits[:, 7] = 20.0
    probs = None if one_hot else torch.full((6, V), 1.0 / V)
    drafts = torch.tensor([[7, 7, 7], [7, 3, 7]])
    tokens = baselines.verified(params, Batch(logits, torch.arange(2), drafts, probs))
    assert tokens.tolist() == [[7, 7, 7, 7], [7, 7, -1, -1]]


def test_a_baseline_that_fails_is_reported_and_ends_nothing():
    calls = list(batch_of(CASES["greedy"], 2).split(1))

    def broken(batch):
        raise RuntimeError("no kernel for this device\nand a long trace")

    assert baseline_time(broken, calls, CPU) == "failed: RuntimeError: no kernel for this device"
    assert "failed: ValueError: token ids" in str(baseline_time(lambda batch: batch.positions + V, calls, CPU))
    assert isinstance(baseline_time(lambda batch: batch.positions, calls, CPU), float)


def test_an_engine_that_is_missing_is_said_to_be():
    assert baselines.imported("no_such_engine.sampling") is None
    if baselines.imported("flashinfer.sampling") is None:
        rows = baselines.baselines_of(CASES["p .9"])
        assert rows[baselines.BY_ROW] == rows[baselines.OF_ALL] == "not installed"


CELL = Cell("greedy", "greedy", 8, 0, 1000, "float32", "peaked", 4.5, 1.25, "bytes", 2)
TIMES = [("slow", 9.0, False), ("fast", 6.5, False), ("wrong", 1.0, True)]
PEERS = Peers("a GPU", "all 1.0", (1000, "float32", "peaked"), [Peer("greedy", n, {8: us}, b) for n, us, b in TIMES])
MEASURED = dataclasses.replace(CELL, target_us=5.0, baselines={"torch.argmax": 9.5})
ENVIRONMENT = dict.fromkeys(("device", "torch", "triton", "python", "commit", "date"), "x")


def test_the_stored_peers_do_jobs_of_the_benchmark():
    peers = stored_peers()
    assert peers.batch == (TARGET_VOCAB_SIZE, TARGET_DTYPE, "peaked")
    for peer in peers.peers:
        case = {**CASES, **VERIFY_CASES}[peer.case]
        assert case.distribution == "peaked"
        assert set(peer.us) <= set(case.targets)
        assert all(us > 0 for us in peer.us.values())
    names = [(peer.case, peer.name) for peer in peers.peers]
    assert len(set(names)) == len(names)


def test_the_fastest_is_not_one_of_another_law_and_another_job_has_no_peer():
    assert PEERS.fastest(CELL) == 6.5
    assert PEERS.beside(CELL) == {name: us for name, us, _ in TIMES}
    for other in ({"vocab": 2000}, {"dtype": "bfloat16"}, {"distribution": "flat"}, {"rows": 1}, {"case": "p .9"}):
        cell = dataclasses.replace(CELL, **other)
        assert (PEERS.beside(cell), PEERS.fastest(cell)) == ({}, None)


def test_a_replay_has_a_column_where_one_was_measured_and_is_stored():
    replayed = dataclasses.replace(CELL, rows=1, replay_us=8.2)
    (plain,), (both,) = tables_of([CELL]), tables_of([CELL, replayed])
    assert len(both.columns) == len(plain.columns) + 1
    assert [*both.columns[-1].cells] == ["", "8.2"]
    assert cells_of(content_of(ENVIRONMENT, [replayed])) == [replayed]


def test_a_table_has_a_line_for_each_peer_and_for_what_was_measured_now():
    cell = dataclasses.replace(CELL, baselines={"torch.argmax": 8.0, "slow": 10.0})
    (both,) = with_peers([cell], PEERS)
    assert both.baselines == {"slow": 10.0, "fast": 6.5, "wrong": 1.0, "torch.argmax": 8.0}
    assert tables_of([both])[0].row_count == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--backend eager --vocab 64 --rows 1 --peers", "--peers must run on an NVIDIA H200, .* measured, got CPU"),
        ("--sharded", "torchrun --nproc-per-node 2"),
    ],
)
def test_another_machine_and_another_start_are_refused(words, message, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=message):
        bench.main(["--device", "cpu", *words.split()])


def test_cells_survive_the_file_where_a_later_run_replaces_them_unless_it_is_of_another_commit(tmp_path):
    path = tmp_path / "bench.json"
    assert stored(str(path), ENVIRONMENT) == []
    other = dataclasses.replace(MEASURED, rows=1, eager_us=7.0, target_us=None, baselines={"vLLM": "not installed"})
    content = content_of(ENVIRONMENT, [MEASURED, other])
    assert content["device"] == "x"
    assert content["table"][0]["ratio"] == 3.6
    path.write_text(json.dumps(content))
    assert stored(str(path), ENVIRONMENT) == cells_of(content) == [MEASURED, other]
    newer = dataclasses.replace(MEASURED, us=4.0)
    assert merged(stored(str(path), ENVIRONMENT), [newer]) == [newer, other]
    with pytest.raises(ValueError, match="same commit"):
        stored(str(path), ENVIRONMENT | {"commit": "y"})


@pytest.mark.parametrize("option", [["--mismatches", "5"], ["--leave"], ["--slow-wire"]])
def test_its_options_come_with_it(option, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", *option])
    assert "must come with --sharded" in capsys.readouterr().err


def test_other_ways_stand_as_multiples_of_ours():
    cells = [
        {"case": "greedy", "rows": 1, "ours": 10.0, "all-gather": 25.0},
        {"case": "greedy", "rows": 8, "ours": 10.0, "all-gather": 30.0, "all-to-all": 20.0},
    ]
    columns = [list(column.cells) for column in table_of(cells).columns]
    assert columns[3:] == [["25.0 (2.50)", "30.0 (3.00)"], ["", "20.0 (2.00)"]]
