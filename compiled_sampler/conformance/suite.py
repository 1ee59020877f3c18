"""All questions, chosen by name, and asked each in a process of its own where the target has a name."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from compiled_sampler.conformance.adapter import Semantics
from compiled_sampler.conformance.bench import AdapterError, Bench
from compiled_sampler.conformance.fresh_process import NotStarted, call
from compiled_sampler.conformance.question import REGISTERED, Outcome, Question, Result, ask, failure
from compiled_sampler.conformance.questions import SECTIONS

QUESTIONS = tuple(sorted(REGISTERED, key=lambda question: SECTIONS.index(question.section)))
"""In the order in which they are asked."""


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


def ask_apart(bench: Bench, question: Question) -> Result:
    """The answer to one question, asked in a new process; one that leaves, hangs or is killed is a failure."""
    start = time.perf_counter()
    try:
        return call(functools.partial(_ask_named, bench, question.name), bench.effort.limit_s)
    except NotStarted:
        raise
    except Exception as error:
        return failure(bench, question, error, start)


def _ask_named(bench: Bench, name: str) -> Result:
    (question,) = chosen([name])  # which has functions that cannot be pickled
    return ask(bench, question, is_interruptible=False)


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


def test_conformance(conformance_result: Result) -> None:
    """The sampler does what is asked: the test that ``pytest_plugin`` makes one of for each question."""
    assert conformance_result.outcome is Outcome.PASSED, f"{conformance_result.detail}\n{conformance_result.repeat}"
