"""Processes that work side by side: each takes the most urgent work that waits, when it has done what it had."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from compiled_sampler.conformance.processes.worker import PATIENCE, NotStarted, Worker

T = TypeVar("T")

MANY_PROCESSORS = 8
"""From so many on, work is dealt to processes even where there is little: each compiles a part of what is needed."""

MOST_WORKERS = 16
"""On a GPU each holds a context of some 500 MB."""

PREPARATION, DEALT, ASKED = range(3)
"""Ranks of work: what many wait for, parts of long questions, and questions."""


def has_many_processors() -> bool:
    """Whether processes are worth their start."""
    return (os.cpu_count() or 1) >= MANY_PROCESSORS


def threads_of_a_process(workers: int) -> int:
    """Threads of torch in each of so many processes; one number on a large machine, since C++ is compiled for it."""
    return max(1, (os.cpu_count() or 1) // (MANY_PROCESSORS if has_many_processors() else workers))


@dataclass(order=True)
class Work:
    """What waits for a process, in the order of ranks and numbers.

    Args:
        rank: of a lower one goes first.
        number: of equal ranks, the lower one goes first.
        do: makes calls of the process that it is given, one after the other.
        future: of what that returns.
    """

    rank: int
    number: int
    do: Callable[[Worker], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)

    def begin(self, worker: Worker) -> None:
        """Do it, unless nobody waits any more, and hand over what it returns or raises."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.do(worker))
        except BaseException as error:
            self.future.set_exception(error)

    def cancel(self) -> None:
        """Tell whoever waits that it will not be done."""
        self.future.cancel()
        self.future.set_running_or_notify_cancel()

    def fail(self, error: Exception) -> None:
        """Tell whoever waits that it cannot be done."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Crew:
    """Processes for work that waits, with a thread each that hands it over.

    There are as many as works were submitted, but no more than processors.

    Args:
        works: for which processes start at once.
        device: that each process makes ready.
        limit_s: seconds for the answer to each call of a process; one that takes longer is replaced.
    """

    def __init__(self, works: int, device: torch.device, limit_s: float) -> None:
        """Start the processes.

        Raises:
            NotStarted: one could not be started; those before it were ended.
        """
        self._most = min(os.cpu_count() or 1, MOST_WORKERS)
        self._setting = threads_of_a_process(min(works, self._most)), device, limit_s
        self._waiting: queue.PriorityQueue[Work] = queue.PriorityQueue()
        self._submitted, self._has_ended, self._lock = 0, False, threading.Lock()
        self._failure: NotStarted | None = None
        self._workers: list[Worker] = []
        try:
            self._start(works)
        except BaseException:
            self._end(0.0)
            raise

    def __enter__(self) -> Crew:
        """Ready for work."""
        return self

    def __exit__(self, *raised: object) -> None:
        """End all processes; where the run was interrupted, work that goes on raises, and what waits is cancelled."""
        self._end(PATIENCE if raised[0] is None else 0.0)

    def _end(self, patience: float) -> None:
        with self._lock:
            self._has_ended = True
        if patience:
            for worker in self._workers:
                worker.release()
        for worker in self._workers:
            worker.end(patience)
        for work in self._left():
            work.cancel()
        for _ in self._workers:  # a thread each that waits
            self._waiting.put(Work(PREPARATION, 0, Worker.is_sound, Future()))

    def _left(self) -> Iterator[Work]:
        """What waits, taken out."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._waiting.get_nowait()

    def submit(self, do: Callable[[Worker], T], rank: int) -> Future[T]:
        """What work will return, or raise.

        Args:
            do: makes calls of the process that it is given, one after the other.
            rank: work of a lower one goes first, and of one rank what came first.

        Raises:
            NotStarted: it needs a process more, which could not be started.
        """
        with self._lock:
            self._submitted += 1
            work = Work(rank, self._submitted, do, Future())
            if self._has_ended:
                work.cancel()
            elif self._failure is not None:
                work.fail(self._failure)
            else:
                self._waiting.put(work)
                self._start(self._submitted)
        return work.future

    def each(self, functions: Sequence[Callable[[], T]]) -> Iterator[T]:
        """What parts of a question return in processes, in their order.

        Args:
            functions: that can be pickled, as their results.

        Raises:
            Exception: what one of them raised.
        """
        made = [self.submit(functools.partial(Worker.call, function=each), DEALT) for each in functions]
        try:
            for future in made:
                yield future.result()
        finally:
            for future in made:  # where one raised, nobody wants the others
                future.cancel()

    def _start(self, works: int) -> None:
        while len(self._workers) < min(works, self._most):
            self._workers.append(Worker(*self._setting))
            threading.Thread(target=self._serve, args=(len(self._workers) - 1,), daemon=True).start()

    def _serve(self, place: int) -> None:
        """Hand work to one process, and to another in its place once that is of no use."""
        while True:
            work = self._waiting.get()
            if self._has_ended:
                work.cancel()
                return
            work.begin(self._workers[place])
            if not self._workers[place].is_sound() and not self._is_replaced(place):
                return

    def _is_replaced(self, place: int) -> bool:
        """Whether another process is in a place; where none can be started, all that waits or comes later fails."""
        with self._lock:
            if self._has_ended:
                return True
            self._workers[place].end()
            try:
                self._workers[place] = Worker(*self._setting)
            except NotStarted as error:
                self._failure = error
                for work in self._left():
                    work.fail(error)
        return self._failure is None


def in_processes(
    functions: Sequence[Callable[[], T]], crew: Crew | None, device: torch.device, limit_s: float
) -> Iterator[T]:
    """What parts of a question return in processes, in their order.

    Args:
        functions: that can be pickled, as their results.
        crew: of the run; None starts one for as many parts.
        device: of the run.
        limit_s: seconds for each part, where none of the run is there.

    Raises:
        Exception: what one of them raised.
    """
    if crew is not None:
        yield from crew.each(functions)
        return
    with Crew(len(functions), device, limit_s) as own:
        yield from own.each(functions)
