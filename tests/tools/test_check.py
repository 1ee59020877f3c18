"""The commands that run the suite: here, in tiers, with a table; and on several versions of torch, counted."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tools import check, compat

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("full", "tiers"), [(False, ["first"]), (True, ["first", "second"])])
def test_the_second_tier_runs_only_when_asked_for(full, tiers, tmp_path):
    marked = "import pytest\n\ndef test_first(): ...\n\n@pytest.mark.full\ndef test_second(): ...\n"
    (tmp_path / "test_tiers.py").write_text(marked, encoding="utf-8")
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    arguments = check.steps(False, full, ["-n", "0", *settings, "-rp", str(tmp_path)])["tests"]
    ran = subprocess.run([sys.executable, "-m", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.findall(r"PASSED test_tiers.py::test_(\w+)", ran.stdout) == tiers


def test_the_table_names_what_failed_and_sums_the_seconds(capsys):
    Console(width=80).print(check.table([check.Result("lint", 1.25, 0), check.Result("tests", 3.5, 2)]))
    shown = capsys.readouterr().out
    assert "passed" in shown
    assert "failed (exit status 2)" in shown
    assert "4.8" in shown


SUITE = """
import warnings
import pytest

def test_passes():
    warnings.warn("compiled_sampler does not know torch 99.1", UserWarning)

def test_fails():
    assert False

@pytest.mark.skip
def test_skipped(): ...

@pytest.fixture
def broken():
    raise RuntimeError

def test_has_an_error(broken): ...
"""


def test_constraints_leave_what_torch_decides_to_the_environment():
    text = "# versions\ntorch==2.13.0\nscipy==1.17.1\nnumpy==2.4.6\ntriton==3.7.1\npytest==9.2.0\nsetuptools==84.2.1\n"
    assert compat.constraints(text) == "# versions\nscipy==1.17.1\npytest==9.2.0\n"


def test_a_run_is_counted(tmp_path, monkeypatch):
    (tmp_path / "test_small.py").write_text(SUITE, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", encoding="utf-8")
    monkeypatch.setattr(compat, "ROOT", tmp_path)
    found = compat.run_suite(Path(sys.executable), ["-n", "0"])
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["failures"] == ["test_small.test_fails", "test_small.test_has_an_error"]
    assert (found["torch"], found["arguments"], found["exit_status"]) == (torch.__version__, ["-n", "0"], 1)


def test_a_failure_in_one_environment_fails_the_run(tmp_path, monkeypatch):
    path = tmp_path / "compat.json"
    statuses = {"2.11.0": 1, "newest": 0}
    monkeypatch.setattr(sys, "argv", ["compat", "--json", str(path), "-k", "filters"])
    monkeypatch.setattr(compat, "prepare", lambda name: None)

    def run_suite(python, pytest_args):
        assert pytest_args == ["-k", "filters"]
        return {"torch": "x", "triton": "y", "exit_status": statuses[python.parts[-3]]}

    monkeypatch.setattr(compat, "run_suite", run_suite)
    assert compat.main() == 1
    assert list(json.loads(path.read_text())) == ["2.11.0", "newest"]
    statuses["2.11.0"] = 0
    assert compat.main() == 0


def test_it_starts_without_any_package():
    usage = [sys.executable, "-I", "-S", "tools/compat.py", "--help"]
    root = Path(compat.__file__).resolve().parents[1]
    assert "usage" in subprocess.run(usage, cwd=root, check=True, capture_output=True, text=True).stdout
