"""Asks a question; whatever an adapter raises is the answer to that question alone."""

from __future__ import annotations

import fnmatch
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from compiled_sampler.conformance.bench import FULL, QUICK, Bench, NotAsked
from compiled_sampler.conformance.evidence.statistics import ALARM
from compiled_sampler.conformance.processes.worker import NotStarted
from compiled_sampler.conformance.question import Finding, Outcome, Question, Result
from compiled_sampler.conformance.questions import QUESTIONS


def chosen(patterns: Sequence[str] = ("*",)) -> list[Question]:
    """The questions whose names, or sections, match one of the patterns.

    Args:
        patterns: names, sections, or shell patterns such as ``law.*``.

    Raises:
        ValueError: a pattern matches none.
    """
    for pattern in patterns:
        if not any(_matches(each, pattern) for each in QUESTIONS):
            names = ", ".join(each.name for each in QUESTIONS)
            raise ValueError(f"no question matches {pattern!r}; there are {names}")
    return [each for each in QUESTIONS if any(_matches(each, pattern) for pattern in patterns)]


def _matches(question: Question, pattern: str) -> bool:
    return fnmatch.fnmatchcase(question.name, pattern) or question.section == pattern


def ask(bench: Bench, question: Question) -> Result:
    """The answer to one question; it does not depend on the questions before it."""
    bench.begin(question.name)
    return answered(bench, question, lambda: question.ask(bench))


def answered(bench: Bench, question: Question, find: Callable[[], Finding]) -> Result:
    """What a function finds, or raises, as the answer to a question.

    Args:
        bench: of the run.
        question: that is asked.
        find: asks it.
    """
    start = time.perf_counter()
    try:
        found = find()
        outcome = Outcome.PASSED if found.is_kept else Outcome.FAILED
    except NotStarted:  # no fault of the sampler: the run ends
        raise
    except NotAsked as reason:
        found, outcome = Finding(True, str(reason), ""), Outcome.NOT_ASKED
    except Exception as error:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        found, outcome = Finding(False, f"raised {type(error).__name__}: {first}", ""), Outcome.FAILED
    return Result(
        question.name,
        question.text,
        outcome,
        found.detail,
        found.power,
        found.p_value,
        found.num_tests * ALARM,
        round(time.perf_counter() - start, 3),
        repeat(bench, question),
        found.counts,
    )


def repeat(bench: Bench, question: Question) -> str:
    """The command that asks a question again with the same rows and seeds."""
    is_full = replace(bench.effort, rows=FULL.rows, limit_s=FULL.limit_s) == FULL
    effort = ["--full" if is_full else "--quick"]
    if bench.effort.rows != (FULL if is_full else QUICK).rows:
        effort += ["--rows", str(bench.effort.rows)]
    if bench.effort.limit_s != FULL.limit_s:
        effort += ["--limit", f"{bench.effort.limit_s:g}"]
    name = bench.name or "MODULE:ADAPTER"
    options = ["--target", name, "--only", question.name, "--device", str(bench.device), *effort]
    seed = ["--seed", str(bench.seed)] if bench.seed else []
    return shlex.join(["python", "-m", "compiled_sampler.conformance", *options, *seed])
