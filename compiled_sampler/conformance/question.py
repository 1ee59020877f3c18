"""A question, and what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from compiled_sampler.conformance.bench import Bench


class Outcome(StrEnum):
    """How a question ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_ASKED = "not asked"


@dataclass(frozen=True, slots=True)
class Count:
    """What was compared on one path.

    Args:
        path: its name.
        compared: rows, or requests with drafts.
        mismatches: those that differ.
        first: the first that differs, in words.
    """

    path: str
    compared: int
    mismatches: int
    first: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one question found.

    Args:
        is_kept: whether the sampler does what is asked.
        detail: of a failure, the first row that shows it with its parameters; else what was looked at.
        power: the smallest fault that is found with 99 %, in words.
        p_value: the smallest one; 1 where rows are compared bit for bit.
        num_tests: p-values that were judged, each with a false-alarm rate of ``evidence.ALARM``; 0: none can happen.
        counts: of a comparison of paths, one for each.
    """

    is_kept: bool
    detail: str
    power: str
    p_value: float = 1.0
    num_tests: int = 0
    counts: tuple[Count, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """One question to a sampler.

    Args:
        name: "section.subject", as ``--only`` takes it.
        text: what is asked, one line.
        ask: asks it.
        is_long: whether it takes longer than others, and begins before them.
        is_measurement: whether it measures time, and is asked when nothing else is going on.
    """

    name: str
    text: str
    ask: Callable[[Bench], Finding]
    is_long: bool = False
    is_measurement: bool = False

    @property
    def section(self) -> str:
        """The section of its name."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one question, as it is written to JSON.

    Args:
        question: its name.
        text: what was asked.
        outcome: passed, failed or not asked.
        detail: why.
        power: the smallest fault that is found with 99 %.
        p_value: the smallest one of the question.
        false_alarm: bound on the probability that the question fails a sampler that is right.
        seconds: it took.
        repeat: the command that asks it again.
        counts: of a comparison of paths, one for each.
        began: seconds into the run.
    """

    question: str
    text: str
    outcome: Outcome
    detail: str
    power: str
    p_value: float
    false_alarm: float
    seconds: float
    repeat: str
    counts: tuple[Count, ...] = ()
    began: float = 0.0
