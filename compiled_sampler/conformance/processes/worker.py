"""A process that is started once and calls one function after the other."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

T = TypeVar("T")


PATIENCE = 10.0
"""Seconds for a process to end: by itself, and once it was killed, unless a driver holds it."""

SETTLING_S = 60.0
"""Seconds for a device to finish what it does, once what a process was asked is answered."""


class NotStarted(RuntimeError):
    """A process could not be started."""


class ProcessEnded(RuntimeError):
    """A process ended without an answer."""


class ProcessHangs(RuntimeError):
    """A process gave no answer in time."""


class Worker:
    """A process that calls what it is sent, and returns what that returned or raised.

    Args:
        threads: of torch in it.
        device: that it makes ready while nobody waits for it, since CUDA takes seconds for that.
        limit_s: seconds for the answer to a call.
    """

    def __init__(self, threads: int, device: torch.device, limit_s: float) -> None:
        """Start it; it imports torch and the target's modules meanwhile.

        Raises:
            NotStarted: the system starts no process more.
        """
        context = multiprocessing.get_context("spawn")
        self._settle, self._limit_s, self._hangs = functools.partial(_settled, device), limit_s, False
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, threads, self._settle))
        try:
            self._process.start()
        except OSError as error:
            self._pipe.close()
            raise NotStarted(f"a process could not be started: {error}") from error
        finally:
            theirs.close()

    def call(self, function: Callable[[], T]) -> T:
        """What the function returns there; one call at a time, and none behind one that hangs.

        Args:
            function: that can be pickled, as its result.

        Raises:
            ProcessEnded: the process ended meanwhile.
            ProcessHangs: it did not answer in time.
            Exception: what the function raised.
        """
        return self._answer_to(function, self._limit_s)

    def _answer_to(self, function: Callable[[], T], limit_s: float) -> T:
        request, limit = pickle.dumps(function), threading.Timer(limit_s, self._give_up)
        limit.daemon = True  # nobody who leaves waits for it
        limit.start()
        try:
            self._pipe.send_bytes(request)  # which waits too, where the process does not read
            has_raised, made = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            if self._hangs:
                words = f"a process gave no answer in {limit_s:g} s and was ended; --limit allows more"
                raise ProcessHangs(words) from None
            self._process.join(PATIENCE)
            status = self._process.exitcode
            raise ProcessEnded(f"a process ended without an answer, with status {status}") from None
        finally:
            limit.cancel()
            limit.join()
        if has_raised:
            raise made
        result: T = made
        return result

    def is_sound(self) -> bool:
        """Whether it answers, and its device does: a fault of a kernel is there to stay."""
        if self._hangs:
            return False
        try:
            self._answer_to(self._settle, SETTLING_S)
        except Exception:
            return False
        return True

    def release(self) -> None:
        """Let it end by itself, once it has nothing to do."""
        self._pipe.close()

    def end(self, patience: float = 0.0) -> None:
        """End it and all that it started, whatever they do.

        Args:
            patience: seconds to wait for it after ``release``: it then leaves nothing behind.
        """
        self._process.join(patience)
        self._kill()
        self._process.join(PATIENCE)

    def _give_up(self) -> None:
        """End it, so that nobody waits for its end of the pipe."""
        self._hangs = True
        self._kill()

    def _kill(self) -> None:
        assert self._process.pid is not None  # it was started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()


def _settled(device: torch.device) -> None:
    """Wait until a device has done all its work."""
    torch.zeros(1, device=device).cpu()


def _serve(pipe: Connection, threads: int, settle: Callable[[], None]) -> None:
    """Answer requests until nobody can send one; interrupts from a terminal reach who started it alone."""
    os.setpgrp()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each starts as many processes more
    torch.set_num_threads(threads)
    with contextlib.suppress(Exception):  # whoever needs the device will be told
        settle()
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(_answer(pipe.recv_bytes()))


def _answer(request: bytes) -> bytes:
    """Whether a function raised, with what; else what it returned. An error that cannot be sent is sent in words."""
    try:
        return pickle.dumps((False, pickle.loads(request)()))
    except BaseException as error:
        try:
            answer = pickle.dumps((True, error))
            pickle.loads(answer)
        except Exception:
            answer = pickle.dumps((True, RuntimeError(f"{type(error).__name__}: {error}")))
        return answer
