"""Is a sampler right and deterministic? ``python -m compiled_sampler.conformance --target package.module:adapter``.

Prints a table of questions with what each would have found, and the command that repeats each failure. The exit status
is 1 if a question failed, 2 if none could be asked.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from compiled_sampler.conformance import report
from compiled_sampler.conformance.bench import SHIPPED, AdapterError, Bench, Effort, effort_of
from compiled_sampler.conformance.fresh_process import NotStarted
from compiled_sampler.conformance.question import Outcome, Result
from compiled_sampler.conformance.suite import QUESTIONS, chosen, declared, run


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


def device_of(name: str) -> torch.device:
    """The device of a name, or ValueError, where torch raises RuntimeError."""
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device must be a device of torch, got {name!r}; cpu, cuda or cuda:1") from None


def command_of(words: Sequence[str]) -> str:
    """The command that repeats a run: without the file that this one wrote."""
    kept = [word for n, word in enumerate(words) if word != "--json" and (n == 0 or words[n - 1] != "--json")]
    kept = [word for word in kept if not word.startswith("--json=")]
    return shlex.join(["python", "-m", "compiled_sampler.conformance", *kept])


def list_questions(effort: Effort) -> None:
    """Print every question with what it finds under an effort."""
    for question in QUESTIONS:
        print(f"{question.name:30} {question.power(effort):45} {question.text}")


def ask_all(options: argparse.Namespace, effort: Effort, command: str) -> list[Result]:
    """The answers that the options ask for, stored after each question: an interrupted run keeps them."""
    if options.target is None:
        raise ValueError("--target is missing; name package.module:adapter or a shipped one, as --help shows")
    questions = chosen(options.only or ["*"])
    bench = Bench(None, options.target, device_of(options.device), effort, options.seed)
    if options.json is not None:
        report.check_place(options.json)  # ends the run now, not at its end
    target = declared(bench)
    if target.complaint:
        print(f"warning: the adapter raised {target.complaint} when it was made", file=sys.stderr)
    ended: list[Result] = []

    def end(result: Result) -> None:
        ended.append(result)
        times = f"{result.seconds:.1f} s, from {result.began:.1f} s on"
        line = f"{len(ended)}/{len(questions)} {result.question} {result.outcome} {times}"
        print(line, file=sys.stderr, flush=True)
        if options.json is not None:
            report.store(options.json, report.as_json(bench, target, ended, command))

    return run(bench, questions, end)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    try:
        effort = effort_of(options.full, options.rows, options.limit)
        if options.list:
            list_questions(effort)
            return 0
        results = ask_all(options, effort, command_of(words))
    except (ValueError, ImportError, AttributeError, OSError, AdapterError, NotStarted) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report.show(results)
    outcomes = {result.outcome for result in results}
    return 1 if Outcome.FAILED in outcomes else 2 if outcomes == {Outcome.NOT_ASKED} else 0


if __name__ == "__main__":
    sys.exit(main())
