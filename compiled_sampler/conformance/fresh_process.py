"""Calls a function in a process of its own, which may leave, hang or be killed without harm to the one that asks."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

PROCESSES = min(os.cpu_count() or 1, 8)  # that work side by side; on a GPU each holds a context of some 500 MB
THREADS = max(1, (os.cpu_count() or 1) // PROCESSES)
"""Of torch in each of them, however many there are: C++ is compiled for a number of threads."""

PATIENCE_S = 10.0  # for a process to end by itself once it has answered: it then leaves nothing behind

MAIN = "from compiled_sampler.conformance.fresh_process import main; main()"


class NotStarted(RuntimeError):
    """A process could not be started: no fault of a sampler."""


class ProcessEnded(RuntimeError):
    """A process ended, or was ended, without an answer."""


class Job(Generic[T]):
    """A call of a function in a new process.

    Args:
        function: that can be pickled, as its result.
        limit_s: seconds for the answer, with the start of the process.
        leads_group: whether all that the process starts ends with it, and interrupts from a terminal do not reach it.

    Raises:
        NotStarted: the system starts no process more.
    """

    def __init__(self, function: Callable[[], T], limit_s: float, *, leads_group: bool = True) -> None:
        self._limit_s, self._leads_group, self._start = limit_s, leads_group, time.monotonic()
        self._is_late: bool | None = None
        # Files, not pipes: a process that does not read or is not read from blocks nobody.
        self._answer, self._log = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as request:
            request.write(pickle.dumps(function))
            request.seek(0)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", MAIN, str(self._answer.fileno())],
                    stdin=request,
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=[self._answer.fileno()],
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=leads_group,
                )
            except OSError as error:
                self._answer.close()
                self._log.close()
                raise NotStarted(f"a process could not be started: {error}") from error

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def is_running(self) -> bool:
        """Whether the process goes on and has time left."""
        return self._process.poll() is None and self.seconds < self._limit_s

    def end(self) -> None:
        """End the process and what it has started, and keep what it has written."""
        if self._is_late is not None:
            return
        self._is_late = self._process.poll() is None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # a group may have ended
            if self._leads_group:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        with self._answer as answer, self._log as log:
            answer.seek(0)
            log.seek(0)
            self._pickled, self._words = answer.read(), log.read().decode(errors="replace").strip().splitlines()

    def result(self) -> T:
        """What the function returned; ends the process.

        Raises:
            ProcessEnded: there was no answer, or none in time.
            Exception: what the function raised.
        """
        self.end()
        if not self._pickled and self._is_late:
            raise ProcessEnded(f"a process gave no answer in {self._limit_s:g} s and was ended; --limit allows more")
        if not self._pickled:
            last, status = (self._words or ["without a word"])[-1], self._process.returncode
            raise ProcessEnded(f"a process ended without an answer, with status {status}: {last}")
        has_raised, value = pickle.loads(self._pickled)
        if has_raised:
            raise value
        result: T = value
        return result


def call(function: Callable[[], T], limit_s: float, *, leads_group: bool = True) -> T:
    """What a function returns in a new process, whose errors are those of ``Job``."""
    job = Job(function, limit_s, leads_group=leads_group)
    try:
        while job.is_running():
            time.sleep(0.05)
    finally:
        job.end()
    return job.result()


def main() -> None:
    """Answer the request of stdin in the file of the first argument."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(THREADS))  # else each starts as many as processors
    torch.set_num_threads(THREADS)
    try:
        answer = pickle.dumps((False, pickle.load(sys.stdin.buffer)()))
    except BaseException as error:
        # In words if it cannot be sent, or would end the process that reads it.
        answer = pickle.dumps((True, RuntimeError(f"{type(error).__name__}: {error}")))
        with contextlib.suppress(Exception):
            as_it_is = pickle.dumps((True, error))
            pickle.loads(as_it_is)
            answer = as_it_is if isinstance(error, Exception) else answer
    with open(int(sys.argv[1]), "wb") as file:
        file.write(answer)
    patience = threading.Timer(PATIENCE_S, os._exit, [0])  # an engine's threads may never end
    patience.daemon = True
    patience.start()
