"""The queue of stages that calls and warm-ups want compiled: threads load them from disk, processes compile the rest.

A thread of this process takes one stage after the other. What is not on disk it hands to a process of its own, which
compiles it at low priority and keeps it there. No caller waits for any of that: eager torch has the same bits.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import multiprocessing
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import torch

from compiled_sampler.exact.triton import LOCK, triton_operators
from compiled_sampler.lowering.compile_process import CompileProcess
from compiled_sampler.lowering.inductor.compilation import Compiled, import_compilers, set_up_triton
from compiled_sampler.lowering.stage_code import EXACT_OPTIONS, StageCode, fault_of
from compiled_sampler.lowering.tuning import is_hand_written
from compiled_sampler.pipeline.schedule import is_gpu

PROCESSES_VARIABLE = "COMPILED_SAMPLER_PROCESSES"
"""The environment variable that says how many processes compile; with 0 nothing is compiled before ``warmup``."""

NOT_KEPT = "it cannot be kept on disk, so that warmup() alone compiles it"
HANGS = "this is a forked child; torch.set_num_threads(1) before its first step lets it run compiled code"
NO_PROCESS = f"no process compiles it, by {PROCESSES_VARIABLE} or for want of GPU memory, so that warmup() alone does"

_MOST, _FEWEST_CORES = 12, 8
_BYTES_EACH = 2**31  # of free GPU memory: a process holds a context and tensors of one stage
_IDLE_SECONDS = 10.0  # after which a thread and its process end
_HEAD_START_SECONDS = 0.1  # for the first draw: then imports want the GIL
_HEAD_START_ON_GPU = 1.0  # where it loads torch's kernels
# of 5e-3: each operator of eager torch gives up the GIL, and waits so long for it; the slowest steps beside an import
# take 85 ms instead of 320, of 27 alone
_SWITCH_SECONDS = 1e-5

_logger = logging.getLogger("compiled_sampler")


Settled = Callable[["WantedStage"], object]


@dataclass(eq=False)
class WantedStage:
    """A stage that is to be compiled."""

    code: StageCode  # without tensors
    settled: Settled | None = None  # called by a thread when the stage is no longer queued
    state: Literal["eager", "queued", "ready", "failed", "refused", "due"] = "eager"
    """Compiled if "ready", else run in eager torch; a call warns once of "failed", and the next one compiles "due".
    What did not compile in its caller's thread is "refused" until the next warm-up."""
    reason: str = ""  # why it is in eager torch
    compiled: Compiled | None = None
    has_run: bool = False

    @property
    def name(self) -> str:
        """Of its function."""
        return self.code.stage.__name__


def number_of_processes(device: torch.device) -> int:
    """The processes that may compile at once: one on few cores, and none where GPU memory is short."""
    # A process of a pool has one: it shares the machine with others like it.
    wanted = os.environ.get(PROCESSES_VARIABLE)
    if wanted is not None:
        if not wanted.isdecimal():
            raise ValueError(f"{PROCESSES_VARIABLE} must be a number of processes, got {wanted!r}; 0 starts none")
        return int(wanted)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    beside = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's processes on this machine
    cores //= max(1, int(beside) if beside.isdecimal() else 1)
    is_alone = cores < _FEWEST_CORES or multiprocessing.parent_process() is not None
    number = 1 if is_alone else min(_MOST, cores - cores // 4)
    if is_gpu(device):
        free: int = torch.cuda.mem_get_info(device)[0]
        number = min(number, free // _BYTES_EACH + len(QUEUE.processes))
    return number


class CompileQueue:
    """Stages that wait for a thread, and the threads; one queue for all samplers of this process."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.processes: set[CompileProcess] = set()
        self.users: WeakSet[Any] = WeakSet()
        self._waiting: deque[WantedStage] = deque()
        self._num_taken = 0
        self._threads: set[threading.Thread] = set()
        self._most_threads, self._head_start = 0, 0.0
        self._is_building = self._is_over = self._is_forked = self._has_warned = False

    def put(self, stages: Sequence[WantedStage], device: torch.device, *, first: bool = False) -> None:
        """Have stages compiled in the background, in this order, or before all others."""
        number = number_of_processes(device)
        with self.lock:
            for wanted in stages:
                wanted.state, wanted.reason = ("queued", "") if number else ("eager", NO_PROCESS)
            if number:
                # what waits may be a GPU's, whose memory allows fewer processes
                self._most_threads = min(number, self._most_threads) if self._waiting else number
                self._waiting.extendleft(reversed(stages)) if first else self._waiting.extend(stages)
                self._head_start = 0.0 if first else _HEAD_START_ON_GPU if is_gpu(device) else _HEAD_START_SECONDS
                self._start_threads()
                self.lock.notify_all()
            elif PROCESSES_VARIABLE not in os.environ and not self._has_warned:
                self._has_warned = True
                _logger.warning("stages stay in eager torch until warmup(): too little GPU memory is free to compile")

    def wake(self) -> None:
        """Have a thread for what waits."""
        if self._waiting and not self._threads:
            with self.lock:
                self._start_threads()

    def _start_threads(self) -> None:
        """Have a thread for each stage that waits, as many as there may be processes."""
        while len(self._threads) < min(self._most_threads, len(self._waiting)) and not self._is_over:
            thread = threading.Thread(target=self._serve, name="compiled_sampler", daemon=True)
            try:
                thread.start()  # it waits for the lock
            except RuntimeError:  # no room for a thread now; the next eager step asks for it again
                return
            self._threads.add(thread)

    def withdraw(self, wanted: WantedStage) -> bool:
        """Whether no thread works on a stage, of which none will take it then."""
        with self.lock:
            with contextlib.suppress(ValueError):
                self._waiting.remove(wanted)
                wanted.state = "eager"
            return wanted.state != "queued"

    def wait_for(self, wanted: WantedStage) -> None:
        """Wait until a stage is no longer queued."""
        with self.lock:
            self.lock.wait_for(lambda: wanted.state != "queued")

    def _serve(self) -> None:
        """Take one stage after the other, until none came for a while."""
        process = CompileProcess()
        with self.lock:
            self.lock.wait_for(lambda: self._is_over, self._head_start)
        try:
            while (wanted := self._next()) is not None:
                try:
                    compiled, reason = self._found_or_compiled(wanted, process)
                except Exception as error:  # of what torch loads, or of our own: a caller must not wait for ever
                    compiled, reason = None, fault_of(error)
                self._settle(wanted, compiled, reason)
        finally:
            self.processes.discard(process)
            process.end()

    def _next(self) -> WantedStage | None:
        with self.lock:
            self.lock.wait_for(lambda: self._waiting or self._is_over, _IDLE_SECONDS)
            if self._waiting and not self._is_over:
                self._num_taken += 1
                return self._waiting.popleft()
            self._threads.discard(threading.current_thread())
            return None

    def _found_or_compiled(self, wanted: WantedStage, process: CompileProcess) -> tuple[Compiled | None, str]:
        """A stage from disk, after a process has compiled it if need be, or why there is none."""
        code = wanted.code
        if is_hand_written(code.stage):
            self.processes.add(process)
            reason = process.compile(code, None)
            if reason:
                return None, reason
            if is_gpu(code.device):  # the stage's next call imports nothing then
                with _with_compilers():
                    set_up_triton(code.device)
                    triton_operators()
            return code.hand_written(), ""
        found, path = _loaded(code)
        if found is not None or path is None:
            return found, NOT_KEPT
        if not self._is_building:
            _logger.info("kernels are being compiled in the background; until then stages run in eager torch")
        self._is_building = True
        self.processes.add(process)
        reason = process.compile(code, path) or f"it cannot be read in {path.parents[2]}"
        return _loaded(code)[0], reason

    def _settle(self, wanted: WantedStage, compiled: Compiled | None, reason: str) -> None:
        with self.lock:
            self._num_taken -= 1
            wanted.compiled, wanted.reason = compiled, reason if compiled is None else ""
            wanted.state = "ready" if compiled is not None else "eager" if reason == NOT_KEPT else "failed"
            is_last = self._is_building and not self._waiting and not self._num_taken
            self._is_building = self._is_building and not is_last
            self.lock.notify_all()
        if wanted.settled is not None:
            try:
                wanted.settled(wanted)
            except Exception:  # of the progress of a caller that is gone
                _logger.exception("progress of warmup(wait=False) failed")
        if is_last:
            _logger.info("all kernels that were asked for are there, but for those in Sampler.statistics().lowering")

    def end(self) -> None:
        """End threads and processes: a thread that the interpreter leaves behind may crash in torch."""
        with self.lock:
            self._is_over = True
            self.lock.notify_all()
        for process in [*self.processes]:
            process.end()
        for thread in [*self._threads]:
            thread.join(5.0)

    @property
    def hangs(self) -> bool:
        """Whether compiled code would hang: in a forked child OpenMP waits for threads that its parent had."""
        return self._is_forked and torch.get_num_threads() > 1

    def after_fork(self) -> None:
        """In the child: no thread and no process is its own, nor what they have taken."""
        users = self.users
        self.__init__()  # type: ignore[misc]
        self.users, self._is_forked = users, True
        for each in users:
            each.forget()


QUEUE = CompileQueue()
atexit.register(QUEUE.end)


@contextmanager
def _with_compilers() -> Iterator[None]:
    """Within, what compiles is imported, and nobody else uses it."""
    with LOCK:
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            import_compilers()
            yield
        finally:
            sys.setswitchinterval(before)


def _loaded(code: StageCode) -> tuple[Compiled | None, Path | None]:
    """What is on disk of the code of a stage, and its place."""
    with _with_compilers(), _beside_captures(code.device):
        path = code.path(EXACT_OPTIONS)
        return code.found(path), path


@contextmanager
def _beside_captures(device: torch.device) -> Iterator[None]:
    """Within, this thread may load kernels while another one captures a graph, which CUDA would refuse both."""
    if device.type != "cuda" or torch.version.hip is not None:
        yield
        return
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED; it comes back as what it was
    with torch.cuda.device(device):
        exchange(ctypes.byref(mode))
        try:
            yield
        finally:
            exchange(ctypes.byref(mode))


def _hold_locks() -> None:
    LOCK.acquire()
    QUEUE.lock.acquire()


def _release_locks() -> None:
    QUEUE.lock.release()
    LOCK.release()


def _in_child() -> None:
    QUEUE.after_fork()
    LOCK.release()


if hasattr(os, "register_at_fork"):
    # A fork waits for an import or a load of our threads: the child would wait for ever for a lock that they hold.
    os.register_at_fork(before=_hold_locks, after_in_parent=_release_locks, after_in_child=_in_child)
