"""Asks the questions one after the other; whatever an adapter raises is the answer to one question."""

from __future__ import annotations

import fnmatch
import functools
import multiprocessing
import shlex
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from typing import Protocol

import torch

from compiled_sampler.conformance.bench import FULL, QUICK, Bench, Effort, NotAsked
from compiled_sampler.conformance.evidence.statistics import ALARM
from compiled_sampler.conformance.processes.pool import has_many_processors
from compiled_sampler.conformance.processes.preparation import preparations, prepared
from compiled_sampler.conformance.question import Finding, Outcome, Question, Result
from compiled_sampler.conformance.questions import QUESTIONS
from compiled_sampler.conformance.targets import find_target


class Progress(Protocol):
    """Is told how a run goes on."""

    def note(self, text: str) -> None:
        """Something else has ended."""

    def begin(self, done: int, total: int, name: str) -> None:
        """A question begins."""

    def end(self, done: int, total: int, result: Result) -> None:
        """A question has ended."""


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
    return fnmatch.fnmatchcase(question.name, pattern) or question.name.partition(".")[0] == pattern


def ask(bench: Bench, question: Question) -> Result:
    """The answer to one question; it does not depend on the questions before it."""
    bench.begin(question.name)
    start = time.perf_counter()
    try:
        found = question.ask(bench)
        outcome = Outcome.PASSED if found.is_kept else Outcome.FAILED
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
    is_full = replace(bench.effort, rows=FULL.rows) == FULL
    effort = ["--full" if is_full else "--quick"]
    if bench.effort.rows != (FULL if is_full else QUICK).rows:
        effort += ["--rows", str(bench.effort.rows)]
    name = bench.name or "MODULE:ADAPTER"
    options = ["--target", name, "--only", question.name, "--device", str(bench.device), *effort]
    seed = ["--seed", str(bench.seed)] if bench.seed else []
    return shlex.join(["python", "-m", "compiled_sampler.conformance", *options, *seed])


def run(bench: Bench, questions: Sequence[Question], progress: Progress | None = None) -> list[Result]:
    """The answers to all questions, in their order.

    Wide questions are asked in processes beside the others, where there are processors and the target has a name.

    Args:
        bench: with the target.
        questions: to ask.
        progress: is told before and behind each question; None where nobody is.
    """
    prepare(bench, questions, progress)
    is_shared = len(questions) > 1 and bench.name is not None and has_many_processors()
    wide = [each for each in questions if each.is_wide and is_shared]
    results: dict[str, Result] = {}
    with ProcessPoolExecutor(max(1, len(wide)), multiprocessing.get_context("spawn")) as pool:
        setting = (bench.name or "", str(bench.device), bench.effort, bench.seed)
        asked = {each.name: pool.submit(_ask_elsewhere, *setting, each.name) for each in wide}
        for question in sorted(questions, key=lambda each: (each.is_measurement, each.name in asked)):
            if progress is not None:
                progress.begin(len(results), len(questions), question.name)
            elsewhere = asked.get(question.name)
            result = ask(bench, question) if elsewhere is None else _awaited(bench, question, elsewhere)
            results[question.name] = result
            if progress is not None:
                progress.end(len(results), len(questions), result)
    return [results[each.name] for each in questions]


def _awaited(bench: Bench, question: Question, elsewhere: Future[Result]) -> Result:
    """The answer of another process; a failure where that ended without one."""
    try:
        return elsewhere.result()
    except Exception as error:
        return ask(bench, replace(question, ask=functools.partial(_raised, error=error)))


def _raised(_: Bench, error: Exception) -> Finding:
    raise error


def prepare(bench: Bench, questions: Sequence[Question], progress: Progress | None) -> None:
    """Let the target compile what the questions need, where it was not compiled before and processors are many."""
    parts = preparations(bench, [each.name for each in questions])
    if not parts:
        return
    if progress is not None:
        progress.begin(0, len(questions), f"preparing {len(parts)} parts")
    start = time.perf_counter()
    done, error = prepared(parts)
    if progress is not None:
        text = f"prepared {done} of {len(parts)} parts in {time.perf_counter() - start:.1f} s"
        progress.note(f"{text}; {error}" if error else text)


def _ask_elsewhere(name: str, device: str, effort: Effort, seed: int, question: str) -> Result:
    """The answer of a process that asks one question."""
    return ask(Bench(find_target(name), name, torch.device(device), effort, seed), chosen([question])[0])
