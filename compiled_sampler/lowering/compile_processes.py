"""Stages compiled by several processes at once, which leave them on disk.

Most of a first warm-up is tracing: 1.7 s a stage in Python, which no thread shares. Whatever goes wrong in another
process is no error here: what is not found on disk afterwards is compiled in this process.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from compiled_sampler.lowering.stage_call import StageCall

VARIABLE = "COMPILED_SAMPLER_PROCESSES"
"""The environment variable that says how many processes compile, 0 for this one alone."""

_MOST, _CORES_EACH, _FEWEST_CORES, _FEWEST_CALLS = 8, 2, 8, 4
_SECONDS, _PATIENCE = 0.02, 300.0  # between two looks for a file; for one file
_WORKER = "compiled_sampler.lowering.compile_worker"


def number_of_processes(calls: int) -> int:
    """The processes that are worth starting for so many calls: 0 for a few calls, or on a machine of few cores.

    A process of a pool starts none, since it shares the machine with others like it.

    Raises:
        ValueError: ``VARIABLE`` is no number.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted is not None:
        if not wanted.isdecimal():
            raise ValueError(f"{VARIABLE} must be a number of processes, got {wanted!r}; 0 starts none")
        return min(int(wanted), calls)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores //= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # torchrun's processes on this machine
    if cores < _FEWEST_CORES or multiprocessing.parent_process() is not None:
        return 0
    return min(_MOST, cores // _CORES_EACH, calls // _FEWEST_CALLS)


class CompileProcesses:
    """Processes that compile stages and keep them on disk, while they are waited for one by one.

    Each takes one to two gigabytes of GPU memory while it lives: a context of CUDA, and the largest input of a stage.

    Args:
        calls: of stages that can be found by name, and where each is to be kept.
        processes: how many; 0 starts none.
    """

    def __init__(self, calls: Sequence[tuple[StageCall, Path]], processes: int) -> None:
        """Start none yet."""
        self._parts = [calls[part::processes] for part in range(processes)]
        self._running: list[subprocess.Popen[bytes]] = []
        self._makers: dict[Path, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> CompileProcesses:
        """Start them; where that fails, stages are not waited for."""
        threads = max(1, (os.cpu_count() or 1) // max(len(self._parts), 1))  # each has a pool of compilers of its own
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": str(threads), VARIABLE: "0"}
        try:
            for part in self._parts:
                given = pickle.dumps((torch.get_num_threads(), [(call.portable(), path) for call, path in part]))
                self._running.append(_started(environment))
                # a thread, since a pipe holds little and a process reads it only once torch is imported
                threading.Thread(target=_send, args=(self._running[-1], given), daemon=True).start()
                self._makers.update({path: self._running[-1] for _, path in part})
        except Exception:  # no such program, no memory for it, a stage that has no name
            self._stop()
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop them."""
        self._stop()

    def wait_for(self, path: Path) -> None:
        """Wait until a file is there, or its maker has ended; all processes are stopped if that takes long."""
        last = time.monotonic() + _PATIENCE
        while not path.exists() and path in self._makers and self._makers[path].poll() is None:
            if time.monotonic() > last:
                self._stop()
            time.sleep(_SECONDS)

    def _stop(self) -> None:
        while self._running:
            process = self._running.pop()
            process.kill()
            process.wait()


def _started(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _WORKER], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, env=environment
    )


def _send(worker: subprocess.Popen[bytes], given: bytes) -> None:
    assert worker.stdin is not None
    try:
        with worker.stdin as pipe:
            pipe.write(given)
    except OSError:
        return  # it has ended
