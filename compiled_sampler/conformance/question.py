"""Questions, what each has found, and the answers of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from compiled_sampler.conformance.bench import Bench, Effort


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
    power: str = ""  # the smallest fault that these draws find with 99 %, in words; "": what ``Question.power`` says
    p_value: float = 1.0  # the smallest one; 1 where rows are compared bit for bit
    num_tests: int = 0
    """P-values that were judged, each with a false-alarm rate of ``evidence.ALARM``; 0: none can happen."""
    counts: tuple[Count, ...] = ()  # of a comparison of paths, one for each


Ask = Callable[[Bench], Finding]
Power = Callable[[Effort], str]


@dataclass(frozen=True, slots=True)
class Question:
    """One question to a sampler."""

    name: str  # "section.subject", as ``--only`` takes it
    text: str  # what is asked, one line
    ask: Ask
    power: Power
    """What is found with 99 % under an effort, where the clock does not end it and a sampler promises everything."""

    @property
    def section(self) -> str:
        """The section of its name."""
        return self.name.partition(".")[0]


REGISTERED: list[Question] = []
"""Filled by ``question`` while the sections are imported; ``questions.QUESTIONS`` has all."""


def question(name: str, text: str, power: Power | str) -> Callable[[Ask], Ask]:
    """Registers a function as the question of this name."""

    def register(ask: Ask) -> Ask:
        says = power if callable(power) else lambda effort: power
        REGISTERED.append(Question(name, text, ask, says))
        return ask

    return register


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one question, as it is written to JSON; fields that ``Finding`` has too are those."""

    question: str
    text: str
    outcome: Outcome
    detail: str
    power: str
    p_value: float
    false_alarm: float  # bound on the probability that the question fails a sampler that is right
    seconds: float  # it took
    repeat: str  # the command that asks it again
    counts: tuple[Count, ...] = ()
    began: float = 0.0  # seconds into the run
