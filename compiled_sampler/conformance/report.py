"""What a run found, as a table on the terminal and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compiled_sampler.conformance.bench import Bench
from compiled_sampler.conformance.evidence import FALSE_ALARM
from compiled_sampler.conformance.question import Outcome, Result
from compiled_sampler.conformance.suite import Declared

COLOURS = {Outcome.PASSED: "green", Outcome.FAILED: "bold red", Outcome.NOT_ASKED: "dim"}
LOG_WIDTH = 240  # columns of a table that no terminal shows: a line is a question


def as_json(bench: Bench, target: Declared, results: Sequence[Result], command: str) -> str:
    """The run as JSON text: what was asked of what, where, and every result."""
    document: dict[str, Any] = {
        "target": bench.name,
        "semantics": {} if target.semantics is None else dataclasses.asdict(target.semantics),
        "device": machine_name(bench.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **target.versions},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "seed": bench.seed,
        "effort": dataclasses.asdict(bench.effort),
        "false_alarm": FALSE_ALARM,
        "results": [dataclasses.asdict(result) for result in results],
    }
    return json.dumps(document, indent=1, default=lambda x: sorted(x) if isinstance(x, frozenset) else str(x)) + "\n"


def machine_name(device: torch.device) -> str:
    """The device as people name it; after a CPU also the GPU of the machine, on which paths may run."""
    gpu = torch.cuda.get_device_name(device if device.type == "cuda" else None) if torch.cuda.is_available() else ""
    cpu = "" if device.type == "cuda" else f"cpu ({platform.machine()})"
    return ", ".join(filter(None, (cpu, gpu)))


def store(path: Path, text: str) -> None:
    """Write a file that appears whole: whoever reads it finds the text of before or this one."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def check_place(path: Path) -> None:
    """Raise OSError where ``store`` could not write a file."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name):
        pass
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")


def show(results: Sequence[Result]) -> None:
    """Print the table, then every failure with the command that repeats it, and the counts of outcomes."""
    console = Console()
    if not console.is_terminal:
        console.width = LOG_WIDTH
    table = Table("question", "outcome", "found with 99 %", "s", "what was seen", box=None, pad_edge=False)
    for result in results:
        outcome = f"[{COLOURS[result.outcome]}]{result.outcome}[/]"
        power, detail = escape(result.power), escape(result.detail)
        table.add_row(result.question, outcome, power, f"{result.seconds:.1f}", detail)
    console.print(table)
    for result in results:
        if result.outcome is Outcome.FAILED:
            print(f"\nFAILED {result.question}: {result.text}\n  {result.detail}\n  {result.repeat}")
    counts = ", ".join(f"{sum(result.outcome is outcome for result in results)} {outcome}" for outcome in Outcome)
    seconds = max((result.began + result.seconds for result in results), default=0.0)
    print(f"\n{counts}; {seconds:.1f} s; a right sampler fails with probability below {FALSE_ALARM:.0e}")
