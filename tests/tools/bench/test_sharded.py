"""Draws of a split vocabulary, measured: what the options are refused for, and the table."""

import pytest

from tools.bench.__main__ import main
from tools.bench.sharded import table_of


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
