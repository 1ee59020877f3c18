"""The command line, its JSON and exit status, targets, the pytest plugin; whatever an adapter does, a run goes on."""

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compiled_sampler.conformance import QUICK, Bench, Outcome, Semantics, ask, chosen, fresh_process, ours, run
from compiled_sampler.conformance.__main__ import main, store
from compiled_sampler.conformance.bench import SHIPPED, find_target
from compiled_sampler.conformance.fresh_process import NotStarted, call
from tests.compiled_sampler.conformance.adapters.race_adapter import Race
from tools import conformance as tool

HERE = "tests.compiled_sampler.conformance"
RIGHT, BROKEN = f"{HERE}.adapters.race_adapter:Race", f"{HERE}.adapters.broken_adapters"
OF_RIGHT = ["--target", RIGHT, "--device", "cpu"]
CPU = torch.device("cpu")


def asked(target, *names):
    bench = Bench(target, None, CPU, QUICK)
    return [ask(bench, each) for each in chosen(names)]


def only(*names):
    return [word for name in names for word in ("--only", name)]


def printed(*words):
    """The exit status of a command, and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    return status, out.getvalue(), err.getvalue()


def test_a_right_sampler_exits_with_0_and_writes_json(capsys, tmp_path):
    path = tmp_path / "run.json"
    status, out, err = printed(*OF_RIGHT, *only("robustness.single_token", "*.impossible"), "--json", str(path))
    assert status == 0
    assert "2 passed, 0 failed" in out
    assert [*tmp_path.iterdir()] == [path]
    stored = json.loads(path.read_text())
    assert [each["outcome"] for each in stored["results"]] == ["passed", "passed"]
    assert stored["versions"]["torch"] == torch.__version__
    assert stored["command"].endswith("--only robustness.single_token --only '*.impossible'")
    declared = {"filters": ["top_k", "top_p", "min_p"], "seed_range": [-(2**63), 2**64 - 1]}
    assert {**declared, "rules": ["match", "rejection"]}.items() <= stored["semantics"].items()
    assert all(each["began"] >= 0.0 for each in stored["results"])
    end = max(each["began"] + each["seconds"] for each in stored["results"])
    assert f"not asked; {end:.1f} s;" in out
    pattern = r"[12]/2 (verification.impossible|robustness.single_token) passed \d+\.\d s, from \d+\.\d s on"
    lines = err.splitlines()  # no terminal: a line for each question
    assert all(re.fullmatch(pattern, line) for line in lines), lines
    assert [line[:3] for line in lines] == ["1/2", "2/2"]
    assert tool.main([str(path), "--json", str(tmp_path / "table.json")]) == 0
    assert "| `robustness.single_token` | yes |" in capsys.readouterr().out


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    store(path, "old")
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("planted")))
    with pytest.raises(OSError, match="planted"):
        store(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_probabilities_that_are_no_numbers_are_failures():
    class Nothing(Race):
        def probs(self, logits, params):
            return super().probs(logits, params) * torch.nan

        def logprobs(self, logits, params, token_ids):
            return super().logprobs(logits, params, token_ids) * torch.nan

    results = asked(Nothing, "law.probs", "law.logprobs")
    assert [each.outcome for each in results] == [Outcome.FAILED] * 2
    assert "the largest error is nan" in results[0].detail


def test_a_fault_exits_with_1_and_names_the_row_and_a_command_that_finds_it_again():
    words = ["--only", "determinism.paths", "--rows", "1500", "--seed", "3"]
    status, out, _ = printed("--target", f"{BROKEN}:PathOfOneBit", "--device", "cpu", *words)
    assert status == 1
    assert "one bit: " in out
    assert "seed 1, position" in out
    command = next(line.strip() for line in out.splitlines() if line.startswith("  python -m"))
    assert command.endswith("--quick --rows 1500 --seed 3")
    status, again, _ = printed(*shlex.split(command)[3:])
    assert (status, again.splitlines()[-4:-1]) == (1, out.splitlines()[-4:-1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: "),
        (["--target", "nothing"], "error: "),
        (["--target", "no.such:Thing"], "error: "),
        (["--target", RIGHT, "--only", "nothing"], "error: "),
        (["--target", RIGHT, "--device", "abacus"], "error: "),
        (["--target", f"{BROKEN}:DeclaresDict"], "error: "),
        ([*OF_RIGHT, "--json", "."], "is a folder"),
        ([*OF_RIGHT, "--json", "nowhere/run.json"], "error: "),
        ([*OF_RIGHT, "--rows", "0"], "--rows must be at least 1, got 0"),
        ([*OF_RIGHT, "--rows", "-3"], "--rows must be at least 1, got -3"),
        ([*OF_RIGHT, "--limit", "0"], "--limit must be seconds above 0, up to 1000000, got 0.0"),
        ([*OF_RIGHT, "--limit", "inf"], "--limit must be seconds above 0, up to 1000000, got inf"),
        ([*OF_RIGHT, "--limit", "nan"], "--limit must be seconds above 0, up to 1000000, got nan"),
        ([*OF_RIGHT, "--limit", "1e7"], "--limit must be seconds above 0, up to 1000000, got 10000000.0"),
        pytest.param(
            ["--target", "flashinfer", "--device", "cpu", "--only", "law.greedy"],
            "No module named 'flashinfer'",
            marks=pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="it is installed"),
        ),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_what_cannot_be_asked_exits_with_2_and_says_why(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_run_of_which_no_question_is_asked_exits_with_2(capsys):
    assert main([*OF_RIGHT, *only("cost.host_time")]) == 2
    assert "0 passed, 0 failed, 1 not asked" in capsys.readouterr().out


def test_questions_are_listed(capsys):
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == len(chosen())
    assert "1.51%" in printed
    assert main(["--list", "--full", "--rows", "1000000"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "total variation 0.38%" in lines["law.no_filter"]
    assert "one in 217147 rows" in lines["determinism.paths"]


def test_an_adapter_that_raises_fails_every_question_and_the_run_goes_on():
    class Raises(Race):
        def sample(self, logits, params, seeds, positions):
            raise RuntimeError("device-side assert\nmore")

    results = asked(Raises, "law.greedy", "determinism.twice", "robustness.empty_batch")
    assert [each.outcome for each in results] == [Outcome.FAILED] * 3
    assert results[0].detail == "raised RuntimeError: device-side assert"

    def cannot_be_made(vocab_size, device):
        raise RuntimeError("no memory")

    cannot_be_made.semantics = Semantics()
    assert [each.outcome for each in asked(cannot_be_made, "law.greedy")] == [Outcome.FAILED]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (lambda drawn, _: [0] * len(drawn), "must return an integer tensor"),
        (lambda drawn, _: drawn.float(), "must return an integer tensor"),
        (lambda drawn, _: drawn[:, None], "must return an integer tensor"),
        (lambda drawn, positions: drawn + (positions == 3) * 100, "row 3, Params(temperature=0.0"),
    ],
)
def test_what_are_no_tokens_is_a_failure_that_says_so_and_names_the_row(tokens, message):
    class Odd(Race):
        def sample(self, logits, params, seeds, positions):
            return tokens(super().sample(logits, params, seeds, positions), positions)

    (result,) = asked(Odd, "law.greedy")
    assert result.outcome is Outcome.FAILED
    assert message in result.detail


def test_choices_are_not_failures():
    class Chooses(Race):
        semantics = Semantics(seeds="none", unsupported=frozenset({"top_k", "min_p"}), dtypes=(), unseeded=False)

    names = ["law.top_k", "law.16_bits", "determinism.twice", "randomness.seed_1", "randomness.unseeded"]
    assert {each.outcome for each in asked(Chooses, *names)} == {Outcome.NOT_ASKED}


def test_drafts_that_no_rule_takes_are_not_asked_of():
    class Refuses(Race):
        semantics = Semantics(rules=("rejection",), draft_kinds=("one_hot",))

        def verify(self, *arguments):
            raise ValueError("no such drafts")

    names = ["verification.drawn", "verification.impossible_drawn"]
    assert {each.outcome for each in asked(Refuses, *names)} == {Outcome.NOT_ASKED}
    assert {each.outcome for each in asked(Refuses, "verification.one_hot")} == {Outcome.FAILED}

    class TakesLaws(Refuses):
        semantics = Semantics(rules=("rejection",), draft_kinds=("probabilities",))

    assert {each.outcome for each in asked(TakesLaws, "verification.out_of_range")} == {Outcome.NOT_ASKED}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_targets_are_found(name):
    assert isinstance(find_target(name).semantics, Semantics)


def test_the_commit_of_a_run_is_not_that_of_a_repository_around_the_environment(tmp_path, monkeypatch):
    author = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    for words in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    installed = tmp_path / "venv/compiled_sampler/conformance"
    installed.mkdir(parents=True)
    monkeypatch.setattr(ours, "__file__", str(installed / "ours.py"))
    monkeypatch.delenv("COMMIT", raising=False)
    assert set(ours.Ours.versions()) == {"compiled-sampler"}
    monkeypatch.setenv("COMMIT", "abc")
    assert ours.Ours.versions()["commit"] == "abc"


def asked_by_pytest(adapter, *words):
    """What pytest prints that asks an adapter."""
    plugin = ["-p", "compiled_sampler.conformance.pytest_plugin", "--pyargs", "compiled_sampler.conformance.suite"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", *plugin]
    ran = subprocess.run([*command, "--sampler-adapter", adapter, *words], capture_output=True, text=True)
    assert ran.returncode != 0
    return ran.stdout + ran.stderr


def test_the_plugin_asks_a_question_a_test_and_refuses_rows_as_the_command_does():
    names = ["--sampler-only", "determinism.t*", "--sampler-only", "determinism.replay"]
    printed = asked_by_pytest(f"{BROKEN}:Stateful", "--sampler-device", "cpu", *names, "--sampler-rows", "1500")
    for part in ("1 failed, 1 skipped", "the second call: ", "--quick --rows 1500"):
        assert part in printed
    assert "--sampler-rows must be at least 1, got 0" in asked_by_pytest(RIGHT, "--sampler-rows", "0")


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
    assert main(["--target", f"{__name__}:Leaves", "--device", "cpu", *only(*names), "--json", str(path)]) == 1
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
    assert main([*OF_RIGHT, "--only", "robustness"]) == 2
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
    words = ["--device", "cpu", *only("robustness.single_token", "robustness.empty_batch"), "--json", str(path)]
    words = ["--target", f"{__name__}:Sleeps", *words]
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
