"""Is a sampler right and deterministic? ``python -m compiled_sampler.conformance --target package.module:adapter``.

Prints a table of questions with what each would have found, and the command that repeats each failure. The exit status
is 1 if a question failed, 2 if none could be asked.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compiled_sampler.conformance.bench import SHIPPED, AdapterError, Bench, Effort, effort_of
from compiled_sampler.conformance.evidence import FALSE_ALARM
from compiled_sampler.conformance.fresh_process import NotStarted
from compiled_sampler.conformance.question import Outcome, Result
from compiled_sampler.conformance.suite import QUESTIONS, Declared, chosen, declared, run

COLOURS = {Outcome.PASSED: "green", Outcome.FAILED: "bold red", Outcome.NOT_ASKED: "dim"}
LOG_WIDTH = 240  # columns of a table that no terminal shows: a line is a question


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(prog="compiled_sampler.conformance", description=__doc__)
    options.add_argument("--target", help=f"package.module:adapter, or one of {', '.join(SHIPPED)}")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    effort = options.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="minutes; the default")
    effort.add_argument("--full", action="store_true", help="sixteen times as many draws, and more")
    options.add_argument("--rows", type=int, metavar="N", help="to compare on every path")
    options.add_argument("--limit", type=float, metavar="SECONDS", help="of the process of a question; then it hangs")
    options.add_argument("--only", action="append", metavar="NAME", help="a question, section or pattern; repeatable")
    options.add_argument("--seed", type=int, default=0, help="of rows and draws; another one is another run")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options.add_argument("--list", action="store_true", help="list the questions with their power, and end")
    return options


def command_of(words: Sequence[str]) -> str:
    """The command that repeats a run: without the file that this one wrote."""
    kept = [word for n, word in enumerate(words) if word != "--json" and (n == 0 or words[n - 1] != "--json")]
    kept = [word for word in kept if not word.startswith("--json=")]
    return shlex.join(["python", "-m", "compiled_sampler.conformance", *kept])


def as_json(bench: Bench, target: Declared, results: Sequence[Result], command: str) -> str:
    """The run as JSON text: what was asked of what, where, and every result."""
    is_cuda = bench.device.type == "cuda"
    # After a CPU also the GPU of the machine, on which paths may run.
    gpu = torch.cuda.get_device_name(bench.device if is_cuda else None) if torch.cuda.is_available() else ""
    document: dict[str, Any] = {
        "target": bench.name,
        "semantics": {} if target.semantics is None else dataclasses.asdict(target.semantics),
        "device": ", ".join(filter(None, ("" if is_cuda else f"cpu ({platform.machine()})", gpu))),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **target.versions},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "seed": bench.seed,
        "effort": dataclasses.asdict(bench.effort),
        "false_alarm": FALSE_ALARM,
        "results": [dataclasses.asdict(result) for result in results],
    }
    return json.dumps(document, indent=1, default=lambda x: sorted(x) if isinstance(x, frozenset) else str(x)) + "\n"


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


def ask_all(options: argparse.Namespace, effort: Effort, command: str) -> list[Result]:
    """The answers that the options ask for, stored after each question: an interrupted run keeps them."""
    if options.target is None:
        raise ValueError("--target is missing; name package.module:adapter or a shipped one, as --help shows")
    questions = chosen(options.only or ["*"])
    try:
        device = torch.device(options.device)
    except RuntimeError:
        raise ValueError(f"--device must be a device of torch, got {options.device!r}; cpu, cuda or cuda:1") from None
    bench = Bench(None, options.target, device, effort, options.seed)
    if options.json is not None:
        check_place(options.json)  # ends the run now, not at its end
    target = declared(bench)
    if target.complaint:
        print(f"warning: the adapter raised {target.complaint} when it was made", file=sys.stderr)
    ended: list[Result] = []

    def end(result: Result) -> None:
        ended.append(result)
        how = f"{result.outcome} {result.seconds:.1f} s, from {result.began:.1f} s on"
        print(f"{len(ended)}/{len(questions)} {result.question} {how}", file=sys.stderr, flush=True)
        if options.json is not None:
            store(options.json, as_json(bench, target, ended, command))

    return run(bench, questions, end)


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    try:
        effort = effort_of(options.full, options.rows, options.limit)
        if options.list:
            for question in QUESTIONS:
                print(f"{question.name:30} {question.power(effort):45} {question.text}")
            return 0
        results = ask_all(options, effort, command_of(words))
    except (ValueError, ImportError, AttributeError, OSError, AdapterError, NotStarted) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(results)
    outcomes = {result.outcome for result in results}
    return 1 if Outcome.FAILED in outcomes else 2 if outcomes == {Outcome.NOT_ASKED} else 0


if __name__ == "__main__":
    sys.exit(main())
