"""The breakdown of a warm-up: phases are told apart, and the next process compiles nothing."""

import json

from tools import warm_up


def test_two_processes_are_timed_and_the_next_one_loads_what_the_first_compiled(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COMPILED_SAMPLER_PROCESSES", "1")
    path = tmp_path / "seconds.json"
    warm_up.main(f"--vocab 300 --rows 2 --modes greedy --device cpu --json {path}".split())
    first, after = json.loads(path.read_text())["seconds"].values()
    assert {"listing and the first stage", "runs", "  in all: shapes of results", "the whole process"} <= first.keys()
    assert {"runs", "  in all: loads of stages"} <= after.keys()
    assert not {"stages", "  in all: shapes of results", "  in all: stages compiled here"} & after.keys()
    assert "next process" in capsys.readouterr().out
