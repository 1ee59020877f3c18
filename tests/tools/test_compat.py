"""The suite on several versions of torch: what is installed, what is counted, and what is kept."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from tools import compat

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
