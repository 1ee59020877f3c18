"""Whatever an adapter does, its question has failed and has a name, and the run goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compiled_sampler.conformance import QUICK, Bench, Outcome, chosen, fresh_process, run
from compiled_sampler.conformance.__main__ import main
from compiled_sampler.conformance.fresh_process import NotStarted, call
from tests.compiled_sampler.conformance.adapters.race_adapter import Race

HERE = "tests.compiled_sampler.conformance"
RIGHT = f"{HERE}.adapters.race_adapter:Race"
CPU = torch.device("cpu")


class Leaves(Race):
    """Leaves in another way for each kind of batch."""

    def sample(self, logits, params, seeds, positions):
        if len(logits) == 0:
            os._exit(0)
        if logits.shape[1] == 1:
            sys.exit(0)
        if (logits == -torch.inf).all():
            os.kill(os.getpid(), signal.SIGKILL)
        if logits.isnan().any():
            raise KeyboardInterrupt
        return super().sample(logits, params, seeds, positions)


WAYS = {
    "robustness.empty_batch": "raised ProcessEnded: a process ended without an answer, with status 0",
    "robustness.single_token": "raised SystemExit: 0",
    "robustness.all_masked": "raised ProcessEnded: a process ended without an answer, with status -9",
    "robustness.nan": "raised KeyboardInterrupt",
}


def test_a_question_in_which_the_engine_leaves_has_failed_and_the_run_goes_on(tmp_path, capsys):
    path, names = tmp_path / "run.json", [*WAYS, "robustness.status"]
    only = [word for name in names for word in ("--only", name)]
    assert main(["--target", f"{__name__}:Leaves", "--device", "cpu", *only, "--json", str(path)]) == 1
    results = {each["question"]: each for each in json.loads(path.read_text())["results"]}
    assert [*results] == [each.name for each in chosen(names)]
    assert results.pop("robustness.status")["outcome"] == "passed"
    assert {each["outcome"] for each in results.values()} == {"failed"}
    assert all(each["detail"].startswith(WAYS[name]) for name, each in results.items()), results
    out = capsys.readouterr().out
    assert all(f"FAILED {name}" in out for name in WAYS)


class LeavesWhenMade(Race):
    """An engine that ends its process where it finds no device."""

    def __init__(self, vocab_size, device):
        os._exit(0)


def test_an_engine_that_leaves_when_it_is_made_fails_its_questions(capsys):
    words = ["--target", f"{__name__}:LeavesWhenMade", "--device", "cpu", "--only", "robustness.status"]
    assert main(words) == 1
    captured = capsys.readouterr()
    assert "warning: the adapter raised ProcessEnded" in captured.err
    assert "FAILED robustness.status" in captured.out


def test_in_one_process_an_exit_is_a_failure_and_an_interrupt_is_the_users():
    results = run(Bench(Leaves, None, CPU, QUICK), chosen(["robustness.single_token", "robustness.status"]))
    assert [each.outcome for each in results] == [Outcome.FAILED, Outcome.PASSED]
    with pytest.raises(KeyboardInterrupt):
        run(Bench(Leaves, None, CPU, QUICK), chosen(["robustness.nan"]))


def test_a_question_that_hangs_has_failed_and_its_limit_is_repeated():
    bench = Bench(None, RIGHT, CPU, replace(QUICK, limit_s=0.1))  # no process starts in it
    (result,) = run(bench, chosen(["robustness.status"]))
    assert result.outcome is Outcome.FAILED
    assert "a process gave no answer in 0.1 s and was ended; --limit allows more" in result.detail
    assert result.repeat.endswith("--quick --limit 0.1")


def test_a_process_that_has_answered_takes_what_it_started_along():
    sleeper = call(start_a_sleeper, 600.0)
    wait_for(lambda: not is_running(sleeper))


def start_a_sleeper():
    return subprocess.Popen(["sleep", "600"]).pid


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_run_that_cannot_start_its_processes_ends_with_an_error(monkeypatch, capsys):
    def refused(*arguments, **options):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(fresh_process.subprocess, "Popen", refused)
    assert main(["--target", RIGHT, "--device", "cpu", "--only", "robustness"]) == 2
    assert "error: a process could not be started: [Errno 11]" in capsys.readouterr().err
    with pytest.raises(NotStarted):  # no fault of the sampler that is asked about
        run(Bench(None, RIGHT, CPU, QUICK), chosen(["robustness.status"]))


class Sleeps(Race):
    """Draws nothing of an empty batch for a long time, and says in which process."""

    def sample(self, logits, params, seeds, positions):
        if len(logits) == 0:
            Path(os.environ["MARK"], f"{os.getpid()}.pid").touch()
            time.sleep(600)
        return super().sample(logits, params, seeds, positions)


def test_an_interrupt_ends_every_process_and_keeps_what_is_known(tmp_path):
    """As Ctrl-C does it, which a terminal sends to the run alone."""
    path = tmp_path / "run.json"
    words = ["--device", "cpu", "--only", "robustness.single_token", "--only", "robustness.empty_batch"]
    words = ["--target", f"{__name__}:Sleeps", *words, "--json", str(path)]
    restored = "import signal as s; s.signal(s.SIGINT, s.default_int_handler)"  # a shell's background job ignores it
    code = f"{restored}; import sys; from compiled_sampler.conformance.__main__ import main; sys.exit(main({words!r}))"
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"MARK": str(tmp_path)}) as process:
        wait_for(lambda: any(tmp_path.glob("*.pid")) and path.exists())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    assert [each["question"] for each in json.loads(path.read_text())["results"]] == ["robustness.single_token"]
    (sleeping,) = tmp_path.glob("*.pid")
    wait_for(lambda: not is_running(int(sleeping.stem)))


def wait_for(is_there):
    end = time.monotonic() + 100
    while not is_there():
        assert time.monotonic() < end
        time.sleep(0.05)
