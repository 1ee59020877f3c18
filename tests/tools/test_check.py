"""The one command of people and CI: what it passes on, what it prints, and the order in which files run."""

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.longest import LONGEST, place_of
from tools import check

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("file", LONGEST)
def test_files_that_run_first_are_there(file: str) -> None:
    assert (ROOT / file).is_file()


def test_the_longest_files_run_first() -> None:
    files = ["tests/graph_cache/test_buckets.py", LONGEST[2], LONGEST[0]]
    ids = [f"{file}::{test}" for file in files for test in ("test_b", "test_a")]
    assert sorted(ids, key=place_of) == [*ids[4:], *ids[2:4], *ids[:2]]


@pytest.mark.parametrize(("minutes", "outcome"), [("0", "skipped"), ("60", "passed")])
def test_what_has_not_begun_in_time_is_skipped_and_counted(minutes: str, outcome: str) -> None:
    few = ["tests/tools/test_check.py", "-k", "files_that_run_first", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "--minutes", minutes, *few]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"{len(LONGEST)} {outcome}" in ran.stdout


def test_pytest_shares_out_files_in_that_order() -> None:
    assert "--no-loadscope-reorder" in check.steps(False, [])["tests"]


def test_arguments_are_those_of_pytest_and_mending_is_for_format_and_lint() -> None:
    plain, mending = check.steps(False, ["-k", "filters"]), check.steps(True, [])
    assert plain["tests"][-2:] == ["-k", "filters"]
    assert "--check" in plain["format"]
    assert "--check" not in mending["format"]
    assert "--fix" in mending["lint"]
    assert "--fix" not in plain["lint"]
    assert plain["types"] == mending["types"]


def test_the_table_names_what_failed_and_sums_the_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=80).print(check.table([check.Result("lint", 1.25, 0), check.Result("tests", 3.5, 2)]))
    shown = capsys.readouterr().out
    assert "passed" in shown
    assert "failed (exit status 2)" in shown
    assert "4.8" in shown
