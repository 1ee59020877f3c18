"""A run tells how it goes on, and what it knows is stored after each question."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from compiled_sampler.conformance import QUICK, Bench, report
from compiled_sampler.conformance import __main__ as command
from compiled_sampler.conformance.account import Account
from compiled_sampler.conformance.question import Outcome, Prepared, Result
from tests.compiled_sampler.conformance.adapters.race_adapter import Race

HERE = "tests.compiled_sampler.conformance"
RIGHT = f"{HERE}.adapters.race_adapter:Race"
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
    assert [line.partition(" passed ")[0] + " passed" for line in lines] == [
        "1/2 robustness.single_token passed",
        "2/2 robustness.empty_batch passed",
    ]
    assert all(re.fullmatch(r"\d+\.\d s, from \d+\.\d s on", line.partition(" passed ")[2]) for line in lines)


def test_an_interrupt_ends_every_process_and_keeps_what_is_known(tmp_path):
    """As Ctrl-C does it, which a terminal sends; the run has processes, as where processors are many."""
    path = tmp_path / "run.json"
    words = ["--target", f"{HERE}.test_progress:Sleeps", *WORDS, "--json", str(path)]
    patch = "from compiled_sampler.conformance.processes import parallel_run as p; p.has_many_processors = lambda: True"
    patch += "; import signal as s; s.signal(s.SIGINT, s.default_int_handler)"  # a shell's background job ignores it
    main = f"import sys; from compiled_sampler.conformance.__main__ import main; sys.exit(main({words!r}))"
    command = [sys.executable, "-c", f"{patch}; {main}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"MARK": str(tmp_path)}) as run:
        wait_for(lambda: any(tmp_path.glob("*.pid")) and "robustness.single_token" in path.read_text())
        run.send_signal(signal.SIGINT)
        assert run.wait(60) != 0
    assert [each["question"] for each in json.loads(path.read_text())["results"]] == ["robustness.single_token"]
    (sleeping,) = tmp_path.glob("*.pid")
    wait_for(lambda: not Path("/proc", sleeping.stem).exists())


def wait_for(is_there):
    end = time.monotonic() + 60
    while not is_there():
        assert time.monotonic() < end
        time.sleep(0.05)


class Sleeps(Race):
    """Draws nothing of an empty batch for a long time, and says in which process."""

    def sample(self, logits, params, seeds, positions):
        if len(logits) == 0:
            Path(os.environ["MARK"], f"{os.getpid()}.pid").touch()
            time.sleep(100)
        return super().sample(logits, params, seeds, positions)


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


def test_results_say_when_they_began_and_the_run_how_long_it_took(tmp_path, capsys):
    path = tmp_path / "run.json"
    assert command.main(["--target", RIGHT, *WORDS, "--json", str(path)]) == 0
    run = json.loads(path.read_text())
    first, second = run["results"]
    assert 0.0 <= first["began"] <= second["began"]
    assert run["preparation"] == []
    end = second["began"] + second["seconds"]
    assert f"not asked; {end:.1f} s;" in capsys.readouterr().out


def test_no_question_begins_before_its_run(capsys):
    """Where its seconds were rounded up: once printed as "from -0.0 s on"."""
    account = Account(1, report.Progress())
    account.end(Result("name", "text", Outcome.PASSED, "", "", 1.0, 0.0, 60.0, ""))
    assert account.results["name"].began == 0.0
    assert capsys.readouterr().err == "1/1 name passed 60.0 s, from 0.0 s on\n"


def test_what_was_prepared_is_stored_with_its_seconds():
    bench = Bench(Race, RIGHT, torch.device("cpu"), QUICK)
    stored = json.loads(report.as_json(bench, [], "", [Prepared("part", "", 2.0, 1.0)]))
    assert stored["preparation"] == [{"part": "part", "error": "", "seconds": 2.0, "began": 1.0}]


def test_a_folder_is_no_file_to_write(tmp_path, capsys):
    assert command.main(["--target", RIGHT, *WORDS, "--json", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


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
