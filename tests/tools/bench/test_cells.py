"""Cells: stored and read back, set beside times of peers for the same job, shown in words, and as multiples of ours."""

import dataclasses
import json

import pytest

from tools.bench import __main__ as bench
from tools.bench.__main__ import main
from tools.bench.cases import CASES, TARGET_DTYPE, TARGET_VOCAB_SIZE, VERIFY_CASES
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
from tools.bench.sharded import table_of

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


def test_the_fastest_is_not_one_of_another_law():
    assert PEERS.fastest(CELL) == 6.5
    assert PEERS.beside(CELL) == {name: us for name, us, _ in TIMES}


def test_another_job_has_no_peer():
    for other in ({"vocab": 2000}, {"dtype": "bfloat16"}, {"distribution": "flat"}, {"rows": 1}, {"case": "p .9"}):
        cell = dataclasses.replace(CELL, **other)  # type: ignore[arg-type]
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


def test_peers_are_not_shown_beside_another_machine():
    with pytest.raises(SystemExit, match="--peers must run on an NVIDIA H200, where they were measured, got CPU"):
        bench.main(["--device", "cpu", "--backend", "eager", "--vocab", "64", "--rows", "1", "--peers"])


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


def test_it_says_that_torchrun_starts_it(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2"):
        main(["--sharded", "--device", "cpu"])


@pytest.mark.parametrize("option", [["--mismatches", "5"], ["--leave"], ["--slow-wire"]])
def test_its_options_come_with_it(option, capsys):
    with pytest.raises(SystemExit):
        main(["--device", "cpu", *option])
    assert "must come with --sharded" in capsys.readouterr().err


def test_other_ways_stand_as_multiples_of_ours():
    cells = [
        {"case": "greedy", "rows": 1, "ours": 10.0, "all-gather": 25.0},
        {"case": "greedy", "rows": 8, "ours": 10.0, "all-gather": 30.0, "all-to-all": 20.0},
    ]
    columns = [list(column.cells) for column in table_of(cells).columns]
    assert columns[3:] == [["25.0 (2.50)", "30.0 (3.00)"], ["", "20.0 (2.00)"]]
