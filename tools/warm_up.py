"""Where does the time of a first warm-up go, and of the next process's?

    python -m tools.warm_up [--vocab 151936] [--rows 256] [--modes greedy full] [--device cuda] [--json FILE]

Two processes one after the other make a sampler and warm it up: the first with empty caches, in a folder of their own,
the second with what the first kept. Each prints a table of seconds, of the clock and of its own CPU. "Listing" is until
the first stage is there, so it waits for other processes too. "In all" lies inside of the phases.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

_INSIDE = (
    ("compiled_sampler.lowering.compiling.parallel_compile.fake_results", "shapes of results"),
    ("compiled_sampler.lowering.compiling.disk_cache.compilation.load", "loads of stages"),
    ("compiled_sampler.lowering.compiling.stage_code.compiled", "stages compiled here"),
    ("compiled_sampler.lowering.compiling.compile_processes.CompileProcesses.wait_for", "waits for other processes"),
)
"""Functions whose time is summed up, and what they do."""

Seconds = dict[str, list[float]]
"""Seconds of the clock, of the CPU, and how often, by phase in the order in which they ended."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run both processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=256, help="most requests of the sampler")
    parser.add_argument("--modes", nargs="+", help="default: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="store the seconds in this file, after each process")
    parser.add_argument("--one", action="store_true", help="be one of the processes, with the caches that there are")
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(warmed_up(options.vocab, options.rows, options.device, options.modes)))
        return
    given = [*(sys.argv[1:] if argv is None else argv), "--one"]
    found: dict[str, Seconds] = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        for name in ("first process", "next process"):
            found[name] = _of_process(given, {**os.environ, **caches})
            print(table_of(name, found[name]), flush=True)
            if options.json:
                from tools.measuring.environment import environment, write_json  # imports torch, which is timed above

                write_json(options.json, {**environment(options.device), "seconds": found})


def warmed_up(vocab: int, rows: int, device: str, modes: Sequence[str] | None) -> Seconds:
    """The phases of a warm-up, the imports included; run it in a new process."""
    found: Seconds = {}
    with _timed(found, "import torch and the library"):
        import torch

        from compiled_sampler import Sampler
    with _timed(found, "sampler"):
        sampler = Sampler(vocab, rows, device, backend="auto" if device == "cuda" else "compiled")
        if device == "cuda":
            torch.cuda.synchronize()
    with _timed(found, "import what compiles"):
        from compiled_sampler.lowering.inductor.compilation import import_compilers

        import_compilers()
    phases, last = {"compiled": "stages", "ran": "runs"}, [time.perf_counter(), time.process_time()]

    def progress(done: int, total: int, label: str) -> None:
        phase = phases.get(label.split()[0], "captures")
        if phase == "stages" and phase not in found:
            phase = "listing and the first stage" if "listing and the first stage" not in found else phase
        now = [time.perf_counter(), time.process_time()]
        _add(found, phase, now[0] - last[0], now[1] - last[1])
        last[:] = now

    with _watched(found):
        sampler.warmup(progress, modes)
    return found


def table_of(name: str, found: Seconds) -> str:
    """A line for each phase."""
    lines = [f"{name:<36} {'seconds':>8} {'of CPU':>8} {'times':>6}"]
    lines += [f"{phase:<36} {wall:8.1f} {cpu:8.1f} {count:6.0f}" for phase, (wall, cpu, count) in found.items()]
    return "\n".join(lines)


def _of_process(arguments: Sequence[str], environment: dict[str, str]) -> Seconds:
    """What ``warmed_up`` finds in a process of its own, and the whole process."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "tools.warm_up", *arguments]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: Seconds = json.loads(printed.splitlines()[-1])
    return {**found, "the whole process": [time.perf_counter() - began, 0.0, 1]}


@contextmanager
def _watched(found: Seconds) -> Iterator[None]:
    """Within, what takes long inside of phases is summed up."""
    patches = [mock.patch(name, _counted(name, f"  in all: {what}", found)) for name, what in _INSIDE]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in reversed(patches):
            each.stop()


def _counted(name: str, label: str, found: Seconds) -> Callable[..., Any]:
    """A function as it is, its time added up."""
    import pkgutil

    function: Callable[..., Any] = pkgutil.resolve_name(name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        with _timed(found, label):
            return function(*args, **kwargs)

    return counted


@contextmanager
def _timed(found: Seconds, phase: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        _add(found, phase, time.perf_counter() - wall, time.process_time() - cpu)


def _add(found: Seconds, phase: str, wall: float, cpu: float) -> None:
    before = found.get(phase, [0.0, 0.0, 0])
    found[phase] = [before[0] + wall, before[1] + cpu, before[2] + 1]


if __name__ == "__main__":
    main()
