"""A run tells how it goes on, and what it knows is stored after each question."""

import json

import pytest

from compiled_sampler.conformance import __main__ as command
from compiled_sampler.conformance import report
from tests.compiled_sampler.conformance.race_adapter import Race

HERE = "tests.compiled_sampler.conformance"
RIGHT = f"{HERE}.race_adapter:Race"
WORDS = ["--device", "cpu", "--only", "robustness.single_token", "--only", "robustness.empty_batch"]


class Interrupted(Race):
    """The user ends the run in the second question."""

    def sample(self, logits, params, seeds, positions):
        if len(logits) == 0:
            raise KeyboardInterrupt
        return super().sample(logits, params, seeds, positions)


def test_each_question_is_a_line_where_stderr_is_no_terminal(capsys):
    assert command.main(["--target", RIGHT, *WORDS]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.rsplit(" ", 2)[0] for line in lines] == [
        "1/2 robustness.single_token passed",
        "2/2 robustness.empty_batch passed",
    ]
    assert all(line.endswith(" s") for line in lines)


def test_names_are_whole_where_stdout_is_no_terminal(capsys):
    assert command.main(["--target", RIGHT, *WORDS]) == 0
    assert "robustness.single_token" in capsys.readouterr().out


def test_a_run_that_is_interrupted_keeps_what_it_has(tmp_path):
    path = tmp_path / "run.json"
    with pytest.raises(KeyboardInterrupt):
        command.main(["--target", f"{HERE}.test_progress:Interrupted", *WORDS, "--json", str(path)])
    run = json.loads(path.read_text())
    assert [each["question"] for each in run["results"]] == ["robustness.single_token"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_ends_the_run_before_it_begins(tmp_path, capsys):
    words = ["--target", RIGHT, *WORDS, "--json", str(tmp_path / "nowhere" / "run.json")]
    assert command.main(words) == 2
    assert "error: " in capsys.readouterr().err


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    report.store(path, "old")
    monkeypatch.setattr(report.Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("planted")))
    with pytest.raises(OSError, match="planted"):
        report.store(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
