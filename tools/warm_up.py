"""Where does the time of a first warm-up go, and of the next process's?

    python -m tools.warm_up [--vocab 151936] [--rows 256] [--modes greedy full] [--device cuda] [--json FILE]

Two processes, one after the other, make a sampler and warm it up: the first with empty caches in a folder of its own,
the second with what the first stored. A table of each has the seconds of its phases. Processes that compile start in
"listing and the first stage", which ends with the first stage.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

PHASES = {"compiled": "other stages", "ran": "runs"}
"""By the first word of what ``Sampler.warmup`` reports; the rest are captures."""


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
        print(json.dumps(phases_of_a_warm_up(options.vocab, options.rows, options.device, options.modes)))
        return
    command = [sys.executable, "-m", "tools.warm_up", *(sys.argv[1:] if argv is None else argv), "--one"]
    seconds: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        for name in ("first process", "next process"):
            start = time.perf_counter()
            ran = subprocess.run(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True)
            seconds[name] = json.loads(ran.stdout.splitlines()[-1]) | {"whole process": time.perf_counter() - start}
            print(f"{name:<28} seconds")
            print(*(f"{phase:<28} {taken:7.1f}" for phase, taken in seconds[name].items()), sep="\n", flush=True)
            if options.json:
                from tools.measuring import environment, write_json  # imports torch, which is timed above

                write_json(options.json, {**environment(options.device), "seconds": seconds})


def phases_of_a_warm_up(vocab: int, rows: int, device: str, modes: Sequence[str] | None) -> dict[str, float]:
    """Seconds by phase, in the order of their ends; run it in a new process."""
    seconds: dict[str, float] = {}
    last = time.perf_counter()

    def ended(phase: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[phase] = seconds.get(phase, 0.0) + now - last
        last = now

    def progress(done: int, total: int, label: str) -> None:
        phase = PHASES.get(label.split()[0], "captures")
        first = phase == "other stages" and "listing and the first stage" not in seconds
        ended("listing and the first stage" if first else phase)

    import torch

    from compiled_sampler import Sampler

    ended("import torch and the library")
    sampler = Sampler(vocab, rows, device, backend="auto" if device == "cuda" else "compiled")
    if device == "cuda":
        torch.cuda.synchronize()
    ended("sampler")
    sampler.warmup(progress, modes)
    return seconds


if __name__ == "__main__":
    main()
