"""The one command of people and CI: what it passes on, which tests it runs and what it prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tools import check

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("full", "tiers"), [(False, ["first"]), (True, ["first", "second"])])
def test_the_second_tier_runs_only_when_asked_for(full: bool, tiers: list[str], tmp_path: Path) -> None:
    marked = "import pytest\n\ndef test_first(): ...\n\n@pytest.mark.full\ndef test_second(): ...\n"
    (tmp_path / "test_tiers.py").write_text(marked, encoding="utf-8")
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    arguments = check.steps(False, full, ["-n", "0", *settings, "-rp", str(tmp_path)])["tests"]
    ran = subprocess.run([sys.executable, "-m", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.findall(r"PASSED test_tiers.py::test_(\w+)", ran.stdout) == tiers


def test_the_table_names_what_failed_and_sums_the_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=80).print(check.table([check.Result("lint", 1.25, 0), check.Result("tests", 3.5, 2)]))
    shown = capsys.readouterr().out
    assert "passed" in shown
    assert "failed (exit status 2)" in shown
    assert "4.8" in shown
