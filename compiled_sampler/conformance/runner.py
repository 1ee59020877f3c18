"""Asks questions: each in a process of its own where the target has a name."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import shlex
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from compiled_sampler.conformance.adapter import Semantics
from compiled_sampler.conformance.bench import FULL, QUICK, AdapterError, Bench, NotAsked
from compiled_sampler.conformance.evidence import ALARM
from compiled_sampler.conformance.fresh_process import NotStarted, call
from compiled_sampler.conformance.question import Finding, Outcome, Question, Result
from compiled_sampler.conformance.questions import QUESTIONS


def chosen(patterns: Sequence[str] = ("*",)) -> list[Question]:
    """The questions whose names, or sections, match one of the patterns.

    Args:
        patterns: names, sections, or shell patterns such as ``law.*``.

    Raises:
        ValueError: a pattern matches none.
    """

    def matches(question: Question, pattern: str) -> bool:
        return fnmatch.fnmatchcase(question.name, pattern) or question.section == pattern

    for pattern in patterns:
        if not any(matches(question, pattern) for question in QUESTIONS):
            names = ", ".join(question.name for question in QUESTIONS)
            raise ValueError(f"no question matches {pattern!r}; there are {names}")
    return [question for question in QUESTIONS if any(matches(question, pattern) for pattern in patterns)]


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
        finding, outcome = Finding(True, str(reason)), Outcome.NOT_ASKED
    except BaseException as error:  # an engine may call sys.exit
        if isinstance(error, KeyboardInterrupt) and is_interruptible:
            raise
        finding, outcome = raised(error), Outcome.FAILED
    return answer(bench, question, outcome, finding, time.perf_counter() - start)


def _ask_named(bench: Bench, name: str) -> Result:
    (question,) = chosen([name])
    return ask(bench, question, is_interruptible=False)


def ask_apart(bench: Bench, question: Question) -> Result:
    """The answer to one question, asked in a new process; one that leaves, hangs or is killed is a failure."""
    start = time.perf_counter()
    try:
        return call(functools.partial(_ask_named, bench, question.name), bench.effort.limit_s)
    except NotStarted:
        raise
    except Exception as error:
        return answer(bench, question, Outcome.FAILED, raised(error), time.perf_counter() - start)


def raised(error: BaseException) -> Finding:
    """What an adapter raised, as a failure."""
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return Finding(False, f"raised {type(error).__name__}: {first}")


def answer(bench: Bench, question: Question, outcome: Outcome, finding: Finding, seconds: float) -> Result:
    """A finding as the answer to a question."""
    return Result(
        question.name,
        question.text,
        outcome,
        finding.detail,
        finding.power or (question.power(bench.effort) if outcome is Outcome.PASSED else ""),
        finding.p_value,
        finding.num_tests * ALARM,
        round(seconds, 3),
        repeat(bench, question),
        finding.counts,
    )


def repeat(bench: Bench, question: Question) -> str:
    """The command that asks a question again with the same rows and seeds."""
    is_full = dataclasses.replace(bench.effort, rows=FULL.rows, limit_s=FULL.limit_s) == FULL
    effort = ["--full" if is_full else "--quick"]
    if bench.effort.rows != (FULL if is_full else QUICK).rows:
        effort += ["--rows", str(bench.effort.rows)]
    if bench.effort.limit_s != FULL.limit_s:
        effort += ["--limit", f"{bench.effort.limit_s:g}"]
    seed = ["--seed", str(bench.seed)] if bench.seed else []
    options = ["--target", bench.name or "MODULE:ADAPTER", "--only", question.name, "--device", str(bench.device)]
    return shlex.join(["python", "-m", "compiled_sampler.conformance", *options, *effort, *seed])


def run(bench: Bench, questions: Sequence[Question], on_result: Callable[[Result], None] | None = None) -> list[Result]:
    """The answers to all questions, one after the other, so that none takes processors from another.

    Args:
        bench: with the target; one without a name is asked in this process, others in a process a question.
        questions: to ask.
        on_result: is called with each answer when its question has ended.

    Raises:
        NotStarted: a process could not be started.
    """
    results, start = [], time.perf_counter()
    for question in questions:
        began = round(time.perf_counter() - start, 2)
        result = ask(bench, question) if bench.name is None else ask_apart(bench, question)
        results.append(dataclasses.replace(result, began=began))
        if on_result is not None:
            on_result(results[-1])
    return results


class Declared(NamedTuple):
    """What a target says of itself."""

    semantics: Semantics | None  # None where the adapter could not be made and declares nothing before it is
    versions: dict[str, str]  # of its library
    complaint: str  # what the adapter raised when it was made, in words; "" if nothing


def declared(bench: Bench) -> Declared:
    """What the target of a bench declares, looked up in a new process, since a module may leave when it is imported."""
    try:
        return call(functools.partial(_declared_here, bench), bench.effort.limit_s)
    except (ImportError, AttributeError, ValueError, AdapterError, NotStarted):  # no such target, or it cannot be asked
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
