"""The breakdown of a warm-up: phases are told apart, and the next process compiles nothing."""

import json

import pytest

from tools import warm_up


@pytest.mark.full
def test_two_processes_are_timed_and_the_next_one_compiles_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COMPILED_SAMPLER_PROCESSES", "1")
    path = tmp_path / "seconds.json"
    warm_up.main(f"--vocab 300 --rows 2 --modes greedy --device cpu --json {path}".split())
    first, after = json.loads(path.read_text())["seconds"].values()
    assert {"listing and the first stage", "runs", "whole process"} <= first.keys()
    assert {"runs", "whole process"} <= after.keys()
    assert "other stages" in first
    assert not {"other stages", "captures"} & after.keys()
    assert "next process" in capsys.readouterr().out
