"""What is known of a run so far, and who is told of it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Protocol

from compiled_sampler.conformance.question import Prepared, Question, Result


class Progress(Protocol):
    """Is told how a run goes on, of one thing at a time."""

    def prepare(self, done: int, total: int, part: Prepared) -> None:
        """A part of the preparation has ended."""

    def begin(self, done: int, total: int, name: str) -> None:
        """A question begins."""

    def end(self, done: int, total: int, result: Result) -> None:
        """A question has ended."""


class Account:
    """Results so far, with the seconds into the run at which each began; threads may tell of them at once.

    Args:
        total: questions of the run.
        progress: is told at once; None where nobody is.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        """The run begins."""
        self.results: dict[str, Result] = {}
        self._prepared, self._total, self._progress = 0, total, progress
        self._start, self._lock, self._is_closed = time.perf_counter(), threading.Lock(), False

    def __enter__(self) -> Account:
        """Within, it takes results."""
        return self

    def __exit__(self, *raised: object) -> None:
        """What is told behind it is of a run that was interrupted, and no result."""
        with self._lock:
            self._is_closed = True

    def prepare(self, total: int, part: Prepared) -> None:
        """A part of the preparation has ended just now.

        Args:
            total: parts that there are.
            part: which.
        """
        with self._lock:
            self._prepared += 1
            if self._progress is not None and not self._is_closed:
                self._progress.prepare(self._prepared, total, replace(part, began=self._began(part.seconds)))

    def begin(self, question: Question) -> None:
        """A question begins."""
        with self._lock:
            if self._progress is not None and not self._is_closed:
                self._progress.begin(len(self.results), self._total, question.name)

    def end(self, result: Result) -> None:
        """A question has ended just now."""
        with self._lock:
            if self._is_closed:
                return
            result = replace(result, began=self._began(result.seconds))
            self.results[result.question] = result
            if self._progress is not None:
                self._progress.end(len(self.results), self._total, result)

    def _began(self, seconds: float) -> float:
        # The seconds of a result are rounded: the first one would begin before the run.
        return max(0.0, round(time.perf_counter() - self._start - seconds, 2))
