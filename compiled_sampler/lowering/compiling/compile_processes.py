"""Stages compiled by several processes at once, which leave them on disk.

Most of a first warm-up is tracing: 1.2 s a stage in Python on a fast host, twice that on a slow one, which no thread
shares. Whatever goes wrong in another process is no error here: what is not found on disk afterwards is compiled in
this process.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch

from compiled_sampler.lowering.stages.stage_call import StageCall
from compiled_sampler.pipeline.schedule import is_gpu

VARIABLE = "COMPILED_SAMPLER_PROCESSES"
"""The environment variable that says how many processes compile, 0 for this one alone."""

_MOST, _FEWEST_CORES, _FEWEST_CALLS = 12, 8, 4
_BYTES_EACH = 2**31  # of free GPU memory
_PATIENCE = 300.0  # seconds for one stage
_WORKER = "compiled_sampler.lowering.compile_worker"

Item = tuple[StageCall, Path]


def number_of_processes(calls: int, device: torch.device) -> int:
    """The processes that are worth starting for so many calls of stages that are neither compiled nor on disk."""
    # None for a few calls, or on a machine of few cores. A process of a pool starts none, since it shares the machine
    # with others like it. On a GPU each takes one to two gigabytes of its memory while it lives, so there are no more
    # than are free.
    wanted = os.environ.get(VARIABLE)
    if wanted is not None:
        if not wanted.isdecimal():
            raise ValueError(f"{VARIABLE} must be a number of processes, got {wanted!r}; 0 starts none")
        return min(int(wanted), calls)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    beside = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's processes on this machine
    cores //= max(1, int(beside) if beside.isdecimal() else 1)
    if cores < _FEWEST_CORES or multiprocessing.parent_process() is not None:
        return 0
    fitting = torch.cuda.mem_get_info(device)[0] // _BYTES_EACH if is_gpu(device) else _MOST
    return min(_MOST, cores - cores // 4, calls // _FEWEST_CALLS, fitting)


class CompileProcesses:
    """Processes that compile stages and keep them on disk; each takes the next one when it has done one."""

    # They are started before it is known which, and import torch meanwhile. Each compiles in one thread, so that a
    # stage is on disk once all its kernels are.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running: list[subprocess.Popen[bytes]] = []
        self._waiting: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._ended: dict[Path, threading.Event] = {}
        self._serving, self._lock = 0, threading.Lock()

    def __enter__(self) -> CompileProcesses:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop()

    def start(self, processes: int) -> None:
        """Have so many at least; where that fails, stages are not waited for."""
        try:
            paths = os.pathsep.join(str(path) or os.getcwd() for path in sys.path)
            environment = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "1", VARIABLE: "0"}
            while len(self._running) < processes:
                self._running.append(_started(environment))
                with self._lock:
                    self._serving += 1
                threading.Thread(target=self._serve, args=(self._running[-1],), daemon=True).start()
        except Exception:  # no such program, no memory for it, no working directory
            self._stop()

    def compile(self, items: Sequence[Item]) -> None:
        """Let them compile stages that can be found by name, in this order, each kept at its place; once."""
        if not self._running:
            return
        self._ended.update((path, threading.Event()) for _, path in items)
        for item in (*items, *[None] * len(self._running)):
            self._waiting.put(item)
        with self._lock:
            if not self._serving:  # all have ended meanwhile
                self._let_go()

    def wait_for(self, path: Path) -> None:
        """Wait until a stage is on disk, or will not be; all processes are stopped if that takes long."""
        ended = self._ended.get(path)
        if ended is not None and not ended.wait(_PATIENCE):
            self._stop()

    def _serve(self, process: subprocess.Popen[bytes]) -> None:
        """Hand a process one stage after the other, until none is left or it ends."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin as requests, process.stdout as answers:
                _send(requests, (torch.get_num_threads(), self._device))
                while (item := self._waiting.get()) is not None:
                    if not self._is_compiled(item, requests, answers):
                        break
        except OSError:
            pass  # it has ended
        with self._lock:
            self._serving -= 1
            if not self._serving:
                self._let_go()

    def _is_compiled(self, item: Item, requests: IO[bytes], answers: IO[bytes]) -> bool:
        """Whether the process is there still, after it was given a stage."""
        call, path = item
        try:
            _send(requests, (call.portable(), path))
            return bool(answers.read(1))
        except Exception:  # the process has ended, or the stage has no name: it is compiled here
            return False
        finally:
            self._ended[path].set()

    def _let_go(self) -> None:
        for ended in self._ended.values():
            ended.set()

    def _stop(self) -> None:
        for _ in self._running:
            self._waiting.put(None)
        while self._running:
            process = self._running.pop()
            process.kill()
            process.wait()
        self._let_go()


def _started(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )


def _send(pipe: IO[bytes], given: object) -> None:
    pipe.write(pickle.dumps(given))
    pipe.flush()
