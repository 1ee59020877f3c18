"""Does the repository pass its checks? Format, lint, types and tests, each one run even when another failed.

Command line::

    python -m tools.check [--fix] [--full] [arguments of pytest]

    python -m tools.check                      the checks and the first tier of the tests, as CI does
    python -m tools.check --full               the tests marked "full" too: products, other sizes, engines
    python -m tools.check --fix -k filters     mend format and lint, then run the tests named like "filters"
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
IN_PARALLEL = ("-n", "auto", "--dist", "loadfile")
"""A file runs in one process, which makes its fixtures once."""
BOTH_TIERS = ("-m", "")
"""In place of pyproject's ``-m "not full"``."""
SLOWEST = ("--durations", "10")


class Result(NamedTuple):
    """How one step ended."""

    step: str
    seconds: float
    status: int


def steps(fix: bool, full: bool, pytest_args: list[str]) -> dict[str, list[str]]:
    """The arguments of ``python -m`` for each step, by name; what they check is configured in pyproject.toml."""
    return {
        "format": ["ruff", "format", *([] if fix else ["--check"]), "."],
        "lint": ["ruff", "check", *(["--fix"] if fix else []), "."],
        "types": ["mypy"],
        "tests": ["pytest", *IN_PARALLEL, *SLOWEST, *(BOTH_TIERS if full else ()), *pytest_args],
    }


def run(step: str, module_args: list[str], console: Console) -> Result:
    """One step, its output passed through as it comes."""
    console.rule(f"{step}: {' '.join(module_args)}", align="left")
    start = time.perf_counter()
    status = subprocess.run([sys.executable, "-m", *module_args], cwd=ROOT, check=False).returncode
    return Result(step, time.perf_counter() - start, status)


def table(results: list[Result]) -> Table:
    """A row for each step: its seconds and how it ended; and the seconds of all."""
    summary = Table("check", "seconds", "result")
    summary.columns[1].justify = "right"
    for step, seconds, status in results:
        ending = "[green]passed[/]" if status == 0 else f"[red]failed[/] (exit status {status})"
        summary.add_row(step, f"{seconds:.1f}", ending)
    summary.add_section()
    summary.add_row("all", f"{sum(result.seconds for result in results):.1f}", "")
    return summary


def main() -> int:
    """1 when any step failed, else 0."""
    parser = argparse.ArgumentParser(description="Run every check of the repository.", allow_abbrev=False)
    parser.add_argument("--fix", action="store_true", help="mend format and lint instead of only reporting them")
    parser.add_argument("--full", action="store_true", help="run both tiers of the tests")
    options, pytest_args = parser.parse_known_args()
    console = Console(highlight=False)
    commands = steps(options.fix, options.full, pytest_args)
    results = [run(step, module_args, console) for step, module_args in commands.items()]
    console.print(table(results))
    return int(any(result.status for result in results))


if __name__ == "__main__":
    sys.exit(main())
