"""A question to a sampler, how it is asked in this process, and its answer."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from compiled_sampler.conformance.bench import FULL, QUICK, Bench, Effort, NotAsked
from compiled_sampler.conformance.evidence import ALARM, one_in
from compiled_sampler.conformance.fresh_process import NotStarted


class Outcome(StrEnum):
    """How a question ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_ASKED = "not asked"


@dataclass(frozen=True, slots=True)
class Count:
    """What was compared on one path."""

    path: str
    compared: int  # rows, or requests with drafts
    mismatches: int
    first: str = ""  # the first that differs, in words


@dataclass(frozen=True, slots=True)
class Finding:
    """What one question has found."""

    is_kept: bool  # whether the sampler does what is asked
    detail: str  # of a failure, the first row that shows it with its parameters; else what was looked at
    power: str = ""  # the smallest fault that these draws find with 99 %, in words; "": what Question.power says
    p_value: float = 1.0  # the smallest one; 1 where rows are compared bit for bit
    num_tests: int = 0  # p-values that were judged, each with a false-alarm rate of evidence.ALARM; 0: none can happen
    counts: tuple[Count, ...] = ()  # of a comparison of paths, one for each


Ask = Callable[[Bench], Finding]
Power = Callable[[Effort], str]


@dataclass(frozen=True, slots=True)
class Question:
    """One question to a sampler."""

    name: str
    """``section.subject``, as ``--only`` takes it."""
    text: str
    """What is asked, one line."""
    ask: Ask
    power: Power
    """What is found with 99 % under an effort, where the clock does not end it and a sampler promises everything."""

    @property
    def section(self) -> str:
        """The section of its name."""
        return self.name.partition(".")[0]


REGISTERED: list[Question] = []
"""Filled by ``question`` while the sections are imported; ``suite.QUESTIONS`` has all."""


def question(name: str, text: str, power: Power | str) -> Callable[[Ask], Ask]:
    """Registers a function as the question of this name."""

    def register(ask: Ask) -> Ask:
        REGISTERED.append(Question(name, text, ask, power if callable(power) else lambda effort: power))
        return ask

    return register


Compare = Callable[[Bench], Iterator[Count]]


def comparison(name: str, text: str, num_compared: Callable[[Effort], int], what: str) -> Callable[[Compare], Compare]:
    """Registers a function that compares as the question of this name: every mismatch that it counts is a failure.

    ``num_compared`` is how many of ``what``, such as "rows", are compared on each path under an effort.
    """

    def register(compare: Compare) -> Compare:
        ask = question(name, text, lambda effort: one_in(num_compared(effort), what))
        ask(lambda bench: judged(compare(bench), what))
        return compare

    return register


def counted(path: str, is_wrong: Tensor, first: str) -> Count:
    """The count of what was compared on a path, bool ``[N]``, with the first that is wrong in words."""
    return Count(path, len(is_wrong), int(is_wrong.sum()), first)


def judged(counts: Iterable[Count], what: str) -> Finding:
    """What counts say, added up by path."""
    totals: dict[str, Count] = {}
    try:
        for count in counts:
            old = totals.get(count.path, Count(count.path, 0, 0))
            compared, mismatches = old.compared + count.compared, old.mismatches + count.mismatches
            totals[count.path] = Count(count.path, compared, mismatches, old.first or count.first)
    except NotAsked:
        if not any(count.mismatches for count in totals.values()):
            raise
    by_path = tuple(totals.values())
    for count in by_path:
        if count.mismatches:
            detail = f"{count.path}: {count.mismatches} of {count.compared} {what} are wrong; {count.first}"
            return Finding(False, detail, counts=by_path)
    fewest = min((count.compared for count in by_path), default=0)
    detail = f"{fewest} {what} or more are right: {', '.join(totals)}"
    return Finding(True, detail, one_in(fewest, what), counts=by_path)


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one question, as it is written to JSON; fields that ``Finding`` has too are those."""

    question: str
    text: str
    outcome: Outcome
    detail: str
    power: str
    p_value: float
    false_alarm: float
    """Bound on the probability that the question fails a sampler that is right."""
    seconds: float
    """Of the question."""
    repeat: str
    """The command that asks it again."""
    counts: tuple[Count, ...] = ()
    began: float = 0.0
    """Seconds into the run."""


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
    except NotStarted:  # no fault of the sampler: the run ends
        raise
    except NotAsked as reason:
        return answer(bench, question, Outcome.NOT_ASKED, Finding(True, str(reason)), start)
    except BaseException as error:  # an engine may call sys.exit
        if isinstance(error, KeyboardInterrupt) and is_interruptible:
            raise
        return failure(bench, question, error, start)
    return answer(bench, question, Outcome.PASSED if finding.is_kept else Outcome.FAILED, finding, start)


def failure(bench: Bench, question: Question, error: BaseException, start: float) -> Result:
    """The answer to a question whose adapter raised something, or ended its process."""
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return answer(bench, question, Outcome.FAILED, Finding(False, f"raised {type(error).__name__}: {first}"), start)


def answer(bench: Bench, question: Question, outcome: Outcome, finding: Finding, start: float) -> Result:
    """A finding as the answer to a question that was asked from ``start`` on."""
    return Result(
        question=question.name,
        text=question.text,
        outcome=outcome,
        detail=finding.detail,
        power=finding.power or (question.power(bench.effort) if outcome is Outcome.PASSED else ""),
        p_value=finding.p_value,
        false_alarm=finding.num_tests * ALARM,
        seconds=round(time.perf_counter() - start, 3),
        repeat=repeat(bench, question),
        counts=finding.counts,
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
