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
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 10.0  # for a process to end by itself once it has answered: it then leaves nothing behind
MAIN = "from compiled_sampler.conformance.fresh_process import main; main()"


class NotStarted(RuntimeError):
    """A process could not be started: no fault of a sampler."""


class ProcessEnded(RuntimeError):
    """A process ended, or was ended, without an answer."""


def call(function: Callable[[], T], limit_s: float, *, leads_group: bool = True) -> T:
    """What a function returns in a new process; both are pickled, and the limit counts the start of the process too."""
    # With ``leads_group`` all that the process starts ends with it, and interrupts from a terminal do not reach it.
    # Files, not pipes: a process that does not read, or is not read from, blocks nobody.
    with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as log:
        request.write(pickle.dumps(function))
        request.seek(0)
        command = [sys.executable, "-c", MAIN, str(answer.fileno())]
        try:
            process = subprocess.Popen(
                command,
                stdin=request,
                stdout=log,
                stderr=log,
                pass_fds=[answer.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=leads_group,
            )
        except OSError as error:
            raise NotStarted(f"a process could not be started: {error}") from error
        is_late = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:  # of an interrupt too
            with contextlib.suppress(ProcessLookupError, PermissionError):  # a group may have ended
                if leads_group:
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
        answer.seek(0)
        log.seek(0)
        pickled, words = answer.read(), log.read().decode(errors="replace").strip().splitlines()
    if not pickled and is_late:
        raise ProcessEnded(f"a process gave no answer in {limit_s:g} s and was ended; --limit allows more")
    if not pickled:
        last = (words or ["without a word"])[-1]
        raise ProcessEnded(f"a process ended without an answer, with status {process.returncode}: {last}")
    has_raised, value = pickle.loads(pickled)
    if has_raised:
        raise value
    result: T = value
    return result


def main() -> None:
    """Answer the request of stdin in the file of the first argument."""
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
