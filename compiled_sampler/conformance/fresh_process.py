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
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

PROCESSES = min(os.cpu_count() or 1, 8)
"""That work side by side; on a GPU each holds a context of some 500 MB."""

THREADS = max(1, (os.cpu_count() or 1) // PROCESSES)
"""Of torch in each of them, however many there are: C++ is compiled for a number of threads."""

PATIENCE_S = 10.0
"""Seconds for a process to end by itself once it has answered: it then leaves nothing behind."""

MAIN = "from compiled_sampler.conformance.fresh_process import main; main()"


class NotStarted(RuntimeError):
    """A process could not be started: no fault of a sampler."""


class ProcessEnded(RuntimeError):
    """A process ended, or was ended, without an answer."""


def call(
    function: Callable[[], T], limit_s: float, stop: threading.Event | None = None, *, leads_group: bool = True
) -> T:
    """What a function returns in a new process.

    Args:
        function: that can be pickled, as its result.
        limit_s: seconds for the answer, with the start of the process.
        stop: ends the process once it is set.
        leads_group: whether all that the process starts ends with it, and interrupts from a terminal do not reach it.

    Raises:
        NotStarted: the system starts no process more.
        ProcessEnded: there was no answer, or none in time.
        Exception: what the function raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        request, answer, log = (Path(folder, name) for name in ("request", "answer", "log"))
        request.write_bytes(pickle.dumps(function))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", MAIN, folder],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=leads_group,
                )
            except OSError as error:
                raise NotStarted(f"a process could not be started: {error}") from error
        try:
            _wait(process, answer, limit_s, stop)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # a group may have ended
                if leads_group:
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
        if not answer.exists():
            last = (log.read_text(errors="replace").strip().splitlines() or ["without a word"])[-1]
            raise ProcessEnded(f"a process ended without an answer, with status {process.returncode}: {last}")
        has_raised, value = pickle.loads(answer.read_bytes())
    if has_raised:
        raise value
    result: T = value
    return result


def _wait(process: subprocess.Popen[bytes], answer: Path, limit_s: float, stop: threading.Event | None) -> None:
    """Return when the process has ended, or has answered and does not end."""
    end, has_answered = time.monotonic() + limit_s, False
    while time.monotonic() < end and not (stop is not None and stop.is_set()):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            return
        if answer.exists() and not has_answered:
            end, has_answered = time.monotonic() + PATIENCE_S, True
    if not answer.exists():
        raise ProcessEnded(f"a process gave no answer in {limit_s:g} s and was ended; --limit allows more")


def main() -> None:
    """Answer the request of a folder."""
    folder = Path(sys.argv[1])
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(THREADS))  # else each starts as many as processors
    torch.set_num_threads(THREADS)
    try:
        answer = pickle.dumps((False, pickle.loads((folder / "request").read_bytes())()))
    except BaseException as error:
        answer = _raised(error)
    unfinished = folder / "unfinished"
    unfinished.write_bytes(answer)
    unfinished.rename(folder / "answer")


def _raised(error: BaseException) -> bytes:
    """An error to be raised where the answer is read; in words if it cannot be sent, or would end that process."""
    in_words = RuntimeError(f"{type(error).__name__}: {error}")
    try:
        answer = pickle.dumps((True, error if isinstance(error, Exception) else in_words))
        pickle.loads(answer)
    except Exception:
        return pickle.dumps((True, in_words))
    return answer
