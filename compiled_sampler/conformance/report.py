"""What a run found, as a table on the terminal and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from compiled_sampler.conformance.bench import Bench
from compiled_sampler.conformance.evidence import FALSE_ALARM
from compiled_sampler.conformance.question import Outcome, Result
from compiled_sampler.conformance.runner import Declared

COLOURS = {Outcome.PASSED: "green", Outcome.FAILED: "bold red", Outcome.NOT_ASKED: "dim"}


def as_json(bench: Bench, target: Declared, results: Sequence[Result], command: str) -> str:
    """The run as JSON text: what was asked of what, where, and every result."""
    choices = {} if target.semantics is None else dataclasses.asdict(target.semantics)
    document: dict[str, Any] = {
        "target": bench.name,
        "semantics": {name: _plain(value) for name, value in choices.items()},
        "device": machine_name(bench.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **target.versions},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "seed": bench.seed,
        "effort": dataclasses.asdict(bench.effort),
        "false_alarm": FALSE_ALARM,
        "results": [dataclasses.asdict(result) for result in results],
    }
    return json.dumps(document, indent=1) + "\n"


def _plain(value: Any) -> Any:
    """A declared choice as JSON takes it: tuples keep their order, and numbers stay numbers."""
    if not isinstance(value, tuple | frozenset):
        return value
    ordered = value if isinstance(value, tuple) else sorted(value, key=str)
    return [item if isinstance(item, int) else str(item) for item in ordered]


def device_name(device: torch.device) -> str:
    """The device as people name it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def machine_name(device: torch.device) -> str:
    """The device; behind the CPU also the GPU beside it, on which paths may run."""
    name, beside = device_name(device), device.type == "cpu" and torch.cuda.is_available()
    return f"{name}, {torch.cuda.get_device_name()}" if beside else name


def summary(results: Sequence[Result]) -> str:
    """Counts of outcomes and the bound on a false alarm, in one line."""
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in Outcome}
    seconds = max((result.began + result.seconds for result in results), default=0.0)
    parts = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return f"{parts}; {seconds:.1f} s; a right sampler fails with probability below {FALSE_ALARM:.0e}"


def store(path: Path, text: str) -> None:
    """Write a file that appears whole: whoever reads it finds the text of before or this one."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False) as new:
        new.write(text)
    os.chmod(new.name, 0o644)  # temporary files are their owner's alone
    try:
        Path(new.name).replace(path)
    except OSError:
        Path(new.name).unlink()
        raise


def check_place(path: Path) -> None:
    """Raise OSError where ``store`` could not write a file."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name):
        pass
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")


class Progress:
    """What is printed while a run goes on, to stderr: on a terminal a line that is written over, else a line each."""

    def begin(self, done: int, total: int, name: str) -> None:
        """Show on a terminal what is asked now."""
        if sys.stderr.isatty():
            print(f"\r\033[K{done}/{total} {name}", end="\r", file=sys.stderr, flush=True)

    def end(self, done: int, total: int, result: Result) -> None:
        """Print how a question ended, where stderr is no terminal: name, outcome, seconds, and when it began."""
        if not sys.stderr.isatty():
            times = f"{result.seconds:.1f} s, from {result.began:.1f} s on"
            line = f"{done}/{total} {result.question} {result.outcome} {times}"
            print(line, file=sys.stderr, flush=True)


def show(results: Sequence[Result]) -> None:
    """Print the table, with rich on a terminal, else plain; then every failure with the command that repeats it."""
    if importlib.util.find_spec("rich") and sys.stdout.isatty():
        _show_rich(results)
    else:
        for result in results:
            print(f"{result.outcome:9} {result.question:30} {result.power:45} {result.seconds:6.1f} s  {result.detail}")
    for result in results:
        if result.outcome is Outcome.FAILED:
            print(f"\nFAILED {result.question}: {result.text}\n  {result.detail}\n  {result.repeat}")
    print(f"\n{summary(results)}")


def _show_rich(results: Sequence[Result]) -> None:
    console, table, escape = (importlib.import_module(f"rich.{module}") for module in ("console", "table", "markup"))
    rows = table.Table("question", "outcome", "found with 99 %", "s", "what was seen")
    for result in results:
        colour = COLOURS[result.outcome]
        outcome = f"[{colour}]{result.outcome}[/]"
        rows.add_row(
            result.question, outcome, escape.escape(result.power), f"{result.seconds:.1f}", escape.escape(result.detail)
        )
    console.Console().print(rows)
