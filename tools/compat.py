"""On which versions of torch does the suite pass? The oldest that is supported and the newest, each in its environment.

Command line::

    bash tools/run compat [--only 2.11.0|newest] [--json FILE] [arguments of pytest]

Environments lie in ``.compat/`` and are kept; a call installs the newest torch that pip finds. Wheels with CUDA take
several GB each. The first tier runs; ``-m ""`` runs both. What passed where is stored by environment, with the
arguments of pytest, in tools/results/compat.json; other environments keep what was stored for them. Needs nothing but
Python.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = {"2.11.0": ("torch==2.11.0", "numpy<2.4"), "newest": ("torch",)}
"""What pip installs, by name. The interpreter of Triton 3.6, which torch 2.11 brings, fails on numpy 2.4."""

_OWN_VERSIONS = ("torch", "triton", "setuptools", "numpy")  # torch says which it takes: 2.11 no setuptools from 82 on
_VERSIONS = """
import json, platform, torch
try:
    import triton
except ImportError:
    triton = None
device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()}"
versions = {"torch": torch.__version__, "triton": getattr(triton, "__version__", "none")}
print(json.dumps({**versions, "python": platform.python_version(), "device": device}))
"""
_NO_ERROR = "ignore:compiled_sampler does not know torch"  # pytest turns warnings into errors


def interpreter(name: str) -> Path:
    """The Python of an environment."""
    return ROOT / ".compat" / name / "bin" / "python"


def constraints(text: str) -> str:
    """constraints.txt without the versions that may differ between environments."""
    return "".join(line for line in text.splitlines(keepends=True) if line.split("==")[0].strip() not in _OWN_VERSIONS)


def prepare(name: str) -> None:
    """Make an environment, or finish and upgrade the one that is there; pip's settings are those of the caller.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    python = interpreter(name)
    if not python.exists():
        venv.create(python.parents[1], with_pip=True)
    with tempfile.TemporaryDirectory() as folder:
        limits = Path(folder) / "constraints.txt"
        limits.write_text(constraints((ROOT / "constraints.txt").read_text(encoding="utf-8")), encoding="utf-8")
        packages = ["--upgrade", *ENVIRONMENTS[name], "pytest-xdist", "--constraint", str(limits)]
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *packages]
        subprocess.run([*pip, "--editable", f"{ROOT}[test,check]"], check=True)


def run_suite(python: Path, pytest_args: list[str]) -> dict[str, Any]:
    """Versions, counts and the names of tests that failed.

    Args:
        python: of the environment.
        pytest_args: further arguments of pytest.
    """
    versions = subprocess.run(
        [str(python), "-W", "ignore", "-c", _VERSIONS], check=True, capture_output=True, text=True
    )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        suite = ["-m", "pytest", "-n", "auto", "--dist", "loadfile", "-W", _NO_ERROR, f"--junitxml={report}"]
        status = subprocess.run([str(python), *suite, *pytest_args], cwd=ROOT, check=False).returncode
        counted = counts(report.read_text(encoding="utf-8")) if report.exists() else {}
    return {**json.loads(versions.stdout), "arguments": pytest_args, "exit_status": status, **counted}


def counts(report: str) -> dict[str, Any]:
    """What passed, failed and was skipped, from pytest's report in XML."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = sorted({f"{case.get('classname')}.{case.get('name')}" for case in failed})
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "failures": names,
    }


def store(path: Path, name: str, found: dict[str, Any]) -> None:
    """Put what was found in one environment into a file, which keeps those of others."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**known, name: found}, indent=1) + "\n", encoding="utf-8")


def commit() -> str:
    """The commit of the working tree, or ``COMMIT`` of the environment where there is only a copy of it."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    return os.environ.get("COMMIT") or found.stdout.strip() or "unknown"


def main() -> int:
    """1 when a test failed anywhere, else 0."""
    parser = argparse.ArgumentParser(description="Run the suite on several versions of torch.", allow_abbrev=False)
    parser.add_argument("--only", choices=list(ENVIRONMENTS), help="one environment instead of all")
    parser.add_argument("--json", type=Path, default=ROOT / "tools" / "results" / "compat.json", help="results")
    options, pytest_args = parser.parse_known_args()
    statuses = []
    for name in [options.only] if options.only else list(ENVIRONMENTS):
        prepare(name)
        found = run_suite(interpreter(name), pytest_args)
        store(options.json, name, {**found, "commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}"})
        outcome = ", ".join(f"{found.get(count, '?')} {count}" for count in ("passed", "failed", "skipped"))
        print(f"torch {found['torch']}, triton {found['triton']}: {outcome}")
        statuses.append(found["exit_status"])
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
