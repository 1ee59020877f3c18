"""Stored times of peers: of jobs that the benchmark has, beside the right cells, and what the README claims of them."""

import dataclasses
import json

import pytest

from tools import readme
from tools.bench import __main__ as bench
from tools.bench.cases import CASES, TARGET_DTYPE, TARGET_VOCAB_SIZE, VERIFY_CASES
from tools.bench.cells import STORED, Cell, Peer, Peers, cells_of, stored_peers, tables_of, with_peers

CELL = Cell("greedy", "greedy", 8, 0, 1000, "float32", "peaked", 4.5, 1.25, "bytes", 2)
TIMES = [("slow", 9.0, False), ("fast", 6.5, False), ("wrong", 1.0, True)]
PEERS = Peers("a GPU", "all 1.0", (1000, "float32", "peaked"), [Peer("greedy", n, {8: us}, b) for n, us, b in TIMES])


def measured(name: str) -> list[Cell]:
    return cells_of(json.loads((STORED.parent / name).read_text()))


def test_the_stored_peers_do_jobs_of_the_benchmark() -> None:
    peers = stored_peers()
    assert peers.batch == (TARGET_VOCAB_SIZE, TARGET_DTYPE, "peaked")
    for peer in peers.peers:
        case = {**CASES, **VERIFY_CASES}[peer.case]
        assert case.distribution == "peaked"
        assert set(peer.us) <= set(case.targets)
        assert all(us > 0 for us in peer.us.values())
    names = [(peer.case, peer.name) for peer in peers.peers]
    assert len(set(names)) == len(names)


def test_the_fastest_is_not_one_of_another_law() -> None:
    assert PEERS.fastest(CELL) == 6.5
    assert PEERS.beside(CELL) == {name: us for name, us, _ in TIMES}


@pytest.mark.parametrize(
    "other", [{"vocab": 2000}, {"dtype": "bfloat16"}, {"distribution": "flat"}, {"rows": 1}, {"case": "p .9"}], ids=str
)
def test_another_job_has_no_peer(other: dict[str, object]) -> None:
    cell = dataclasses.replace(CELL, **other)  # type: ignore[arg-type]
    assert PEERS.beside(cell) == {}
    assert PEERS.fastest(cell) is None


def test_a_table_has_a_line_for_each_peer_and_for_what_was_measured_now() -> None:
    cell = dataclasses.replace(CELL, baselines={"torch.argmax": 8.0, "slow": 10.0})
    (both,) = with_peers([cell], PEERS)
    assert both.baselines == {"slow": 10.0, "fast": 6.5, "wrong": 1.0, "torch.argmax": 8.0}
    assert tables_of([both])[0].row_count == 5


def test_the_readme_sets_the_fastest_beside_each_cell() -> None:
    verified = dataclasses.replace(CELL, num_drafts=3)
    cells = [CELL, verified, dataclasses.replace(CELL, rows=1)]
    sampled = readme.compared(cells, PEERS).splitlines()
    assert sampled == ["| case | B=8 |", "| --- | ---: |", "| greedy | 4.5 / 6.5 |"]
    drafted = readme.compared(cells, PEERS, verifies=True).splitlines()
    assert drafted == ["| case | requests=8 |", "| --- | ---: |", "| greedy | 4.5 / 6.5 |"]


def test_what_is_stored_is_faster_than_each_peer_as_the_readme_says() -> None:
    cells, peers = [*measured("bench.json"), *measured("bench_verify.json")], stored_peers()
    compared = [(cell.us, us) for cell in cells if (us := peers.fastest(cell))]
    assert len(compared) == 7 * 5 + 2 * 3
    assert all(us < fastest for us, fastest in compared)


def test_peers_are_not_shown_beside_another_machine() -> None:
    with pytest.raises(SystemExit, match="--peers must run on an NVIDIA H200, where they were measured, got CPU"):
        bench.main(["--device", "cpu", "--backend", "eager", "--vocab", "64", "--rows", "1", "--peers"])
