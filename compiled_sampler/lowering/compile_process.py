"""A process that compiles stages at low priority and leaves them on disk: how it is asked, and its own program.

Most of the time is tracing, 1.2 s a stage in Python on a fast host and twice that on a slow one: a thread of the
caller's process would hold the GIL for it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from compiled_sampler.exact.triton import LOCK
from compiled_sampler.lowering.inductor.compilation import assembler_of_triton, import_compilers, set_up_compilers
from compiled_sampler.lowering.stage_code import EXACT_OPTIONS, StageCode, fault_of

_PATIENCE = 300.0  # seconds without a tick of CPU time, after which a process hangs; on busy cores it only waits
_NICENESS = 19
_PROGRAM = f"from {__name__} import main; main()"  # by -m this module, already imported, would be run a second time


class CompileProcess:
    """A process, started when it gets its first stage, and again if it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, code: StageCode, path: Path | None) -> str:
        """Let it compile a stage that is kept at a path; why it did not, empty where it did.

        Without a path it launches the hand-written kernels of a stage, which Triton then keeps.
        """
        try:
            if self._process is None or self._process.poll() is not None:
                self.end()
                with LOCK:
                    environment = assembler_of_triton(code.device)
                self._process = _started(environment)
        except Exception as error:  # no such program, no memory for it, no working directory
            return f"no process can be started to compile it, {type(error).__name__}: {error}"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            with _killed_if_it_hangs(self._process):
                self._process.stdin.write(pickle.dumps((torch.get_num_threads(), code, path)))
                self._process.stdin.flush()
                reason: str = pickle.load(self._process.stdout)
        except Exception as error:
            return f"the process that compiles it ended or cannot be asked, {type(error).__name__}: {error}"
        return reason

    def end(self) -> None:
        """Stop it, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]


@contextmanager
def _killed_if_it_hangs(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Within, a process is killed that uses no CPU time, nor do the compilers that it starts."""
    is_over = threading.Event()

    def watch() -> None:
        before = -1.0
        while not is_over.wait(_PATIENCE):
            now = _cpu_ticks(process.pid)
            if now == before:
                process.kill()
                return
            before = now

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _cpu_ticks(session: int) -> float:
    """CPU time of all processes of a session; where no system tells, a number that grows."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15])) if int(fields[3]) == session else 0
    return ticks if Path("/proc/self/stat").exists() else time.monotonic()


def _started(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(str(path) or os.getcwd() for path in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, str(_NICENESS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "1", **environment},
        start_new_session=True,
    )


def main() -> None:
    """The program: compiles one stage after the other that its standard input names, until there are no more.

    It answers on its standard output why a stage is not there, a pickled text that is empty where it is.
    """
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints is no answer
    with contextlib.suppress(AttributeError, OSError):
        os.nice(int(sys.argv[1]))
    import_compilers()
    with contextlib.suppress(EOFError):
        while True:
            threads, code, path = pickle.load(requests)
            torch.set_num_threads(threads)
            answers.write(pickle.dumps(_compiled(code, path)))
            answers.flush()


def _compiled(code: StageCode, path: Path | None) -> str:
    """Why a stage is not at a path, after it was compiled; empty where it is, and where Triton keeps it."""
    try:
        if code.device.type == "cuda":
            torch.cuda.set_device(code.device)
            set_up_compilers(code.device)
        if code.path(EXACT_OPTIONS) != path:
            return (
                "the process has settings of torch that processes it starts do not have, so that warmup() compiles it"
            )
        code.found_or_compiled(EXACT_OPTIONS)
        if code.device.type == "cuda":
            torch.cuda.synchronize(code.device)
            torch.cuda.empty_cache()
    except Exception as error:
        return fault_of(error)
    return "" if path is None or path.exists() else f"it cannot be kept in {path.parents[2]}"
