"""Asks questions: each in a process of its own where the target has a name, and a few at a time."""

from __future__ import annotations

import fnmatch
import functools
import shlex
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import NamedTuple, Protocol

from compiled_sampler.conformance.adapter import Semantics
from compiled_sampler.conformance.bench import FULL, QUICK, AdapterError, Bench, NotAsked
from compiled_sampler.conformance.evidence import ALARM
from compiled_sampler.conformance.fresh_process import PROCESSES, NotStarted, call
from compiled_sampler.conformance.question import Finding, Outcome, Question, Result
from compiled_sampler.conformance.questions import QUESTIONS


class Progress(Protocol):
    """Is told how a run goes on."""

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
        if not any(_matches(question, pattern) for question in QUESTIONS):
            names = ", ".join(question.name for question in QUESTIONS)
            raise ValueError(f"no question matches {pattern!r}; there are {names}")
    return [question for question in QUESTIONS if any(_matches(question, pattern) for pattern in patterns)]


def _matches(question: Question, pattern: str) -> bool:
    return fnmatch.fnmatchcase(question.name, pattern) or question.section == pattern


def ask(bench: Bench, question: Question, *, is_interruptible: bool = True) -> Result:
    """The answer to one question, in this process; it does not depend on the questions before it.

    Args:
        bench: to draw with.
        question: to ask.
        is_interruptible: whether KeyboardInterrupt is the user's; else it is what the adapter raised.
    """
    start = time.perf_counter()
    bench.begin(question.name)
    try:
        finding = question.ask(bench)
        outcome = Outcome.PASSED if finding.is_kept else Outcome.FAILED
    except NotStarted:  # no fault of the sampler: the run ends
        raise
    except NotAsked as reason:
        finding, outcome = Finding(True, str(reason), ""), Outcome.NOT_ASKED
    except BaseException as error:  # an engine may call sys.exit
        if isinstance(error, KeyboardInterrupt) and is_interruptible:
            raise
        finding, outcome = raised(error), Outcome.FAILED
    return answer(bench, question, outcome, finding, time.perf_counter() - start)


def ask_apart(bench: Bench, question: Question, stop: threading.Event | None = None) -> Result:
    """The answer to one question, asked in a new process; one that leaves, hangs or is killed is a failure.

    Args:
        bench: of a target with a name.
        question: to ask.
        stop: ends the process once it is set.

    Raises:
        NotStarted: the process could not be started.
    """
    start = time.perf_counter()
    try:
        return call(functools.partial(_ask_named, bench, question.name), bench.effort.limit_s, stop)
    except NotStarted:
        raise
    except Exception as error:
        return answer(bench, question, Outcome.FAILED, raised(error), time.perf_counter() - start)


def _ask_named(bench: Bench, name: str) -> Result:
    (question,) = chosen([name])
    return ask(bench, question, is_interruptible=False)


def raised(error: BaseException) -> Finding:
    """What an adapter raised, as a failure."""
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return Finding(False, f"raised {type(error).__name__}: {first}", "")


def answer(bench: Bench, question: Question, outcome: Outcome, finding: Finding, seconds: float) -> Result:
    """A finding as the answer to a question."""
    return Result(
        question.name,
        question.text,
        outcome,
        finding.detail,
        finding.power,
        finding.p_value,
        finding.num_tests * ALARM,
        round(seconds, 3),
        repeat(bench, question),
        finding.counts,
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


def run(bench: Bench, questions: Sequence[Question], progress: Progress | None = None) -> list[Result]:
    """The answers to all questions, in their order.

    Long questions begin first, and measurements when all else has ended.

    Args:
        bench: with the target; one without a name is asked in this process, one question after the other.
        questions: to ask.
        progress: is told when a question begins and ends; None where nobody is.

    Raises:
        NotStarted: a process could not be started.
    """
    waiting = sorted(questions, key=lambda question: (question.is_measurement, not question.is_long))
    results: dict[str, Result] = {}
    start, total = time.perf_counter(), len(waiting)

    def begin(question: Question) -> None:
        if progress is not None:
            progress.begin(len(results), total, question.name)

    def end(result: Result) -> None:
        began = max(0.0, round(time.perf_counter() - start - result.seconds, 2))  # seconds were rounded, maybe up
        results[result.question] = result = replace(result, began=began)
        if progress is not None:
            progress.end(len(results), total, result)

    if bench.name is None:
        for question in waiting:
            begin(question)
            end(ask(bench, question))
        return [results[question.name] for question in questions]
    running: dict[Future[Result], Question] = {}
    stop = threading.Event()
    with ThreadPoolExecutor(PROCESSES) as threads:
        try:
            while waiting or running:
                while waiting and len(running) < (1 if waiting[0].is_measurement else PROCESSES):
                    question = waiting.pop(0)
                    running[threads.submit(ask_apart, bench, question, stop)] = question
                    begin(question)
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    del running[future]
                    end(future.result())
        finally:
            stop.set()  # an interrupt ends every process
    return [results[question.name] for question in questions]


class Declared(NamedTuple):
    """What a target says of itself."""

    semantics: Semantics | None
    """None where the adapter could not be made and declares nothing before it is."""
    versions: dict[str, str]
    """Of its library."""
    complaint: str
    """What the adapter raised when it was made, in words; "" if nothing."""


def declared(bench: Bench) -> Declared:
    """What the target of a bench declares, looked up in a new process, since a module may leave when it is imported.

    Raises:
        ImportError, AttributeError, ValueError: there is no such target, or a library that it needs is missing.
        AdapterError: what it declares is no ``Semantics``.
        NotStarted: the process could not be started.
    """
    try:
        return call(functools.partial(_declared_here, bench), bench.effort.limit_s)
    except (ImportError, AttributeError, ValueError, AdapterError, NotStarted):
        raise
    except Exception as error:
        return Declared(None, {}, f"{type(error).__name__}: {error}")


def _declared_here(bench: Bench) -> Declared:
    complaint = ""
    try:
        bench.adapter(32)
    except ImportError:
        raise
    except BaseException as error:
        complaint = f"{type(error).__name__}: {error}"
    versions: dict[str, str] = getattr(bench.target, "versions", dict)()
    is_unknown = bool(complaint) and not hasattr(bench.target, "semantics")
    return Declared(None if is_unknown else bench.semantics, versions, complaint)
