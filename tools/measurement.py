"""What measurements share: where and with what they were taken, how they are stored, how a comparison ends."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table


def environment(device: str | None = None) -> dict[str, str]:
    """Where and with what something was measured.

    Args:
        device: "cuda" or "cpu"; None is CUDA where there is one.
    """
    cuda = torch.cuda.is_available() if device is None else device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU {platform.machine()}",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def write_json(path: str, content: dict[str, Any]) -> None:
    """Store a measurement, readable by people too."""
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=1) + "\n")


def reported(counts: Iterable[NamedTuple], control: bool, path: str | None) -> int:
    """Print what was compared; the exit status: 1 where something differs, or should have.

    Args:
        counts: of a batch on a path, with its number of ``mismatches``. Those of the same path are added up, and stored
            after each, so that a run which is cut off has said what it found.
        control: whether every path must differ.
        path: of the JSON file; None stores nothing.
    """
    compared: list[dict[str, Any]] = []
    facts = environment()
    with Console().status("preparing") as status:
        for compared in summed(counts):
            wrong = sum(row["mismatches"] for row in compared)
            status.update(f"{len(compared)} paths, {wrong:,} mismatches so far")
            if path:
                write_json(path, {"environment": facts, "control": control, "paths": compared})
    table = Table(*compared[0], title="against eager torch on the CPU")
    for row in compared:
        table.add_row(*map(_shown, row.values()))
    Console().print(table)
    return int(any((row["mismatches"] > 0) != control for row in compared))


def summed(counts: Iterable[NamedTuple]) -> Iterator[list[dict[str, Any]]]:
    """After each count the totals so far: numbers of counts whose strings are the same are added up."""
    totals: dict[tuple[str, ...], dict[str, Any]] = {}
    for count in counts:
        names = tuple(value for value in count if isinstance(value, str))
        before = totals.get(names, {})
        totals[names] = {
            name: value if isinstance(value, str) else before.get(name, 0) + value
            for name, value in count._asdict().items()
        }
        yield list(totals.values())


def _shown(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}"


def _version(module: str) -> str:
    try:
        return str(__import__(module).__version__)
    except ImportError:
        return "none"


def _commit() -> str:
    """The commit of the working tree, or ``COMMIT`` of the environment where there is only a copy of it."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()
