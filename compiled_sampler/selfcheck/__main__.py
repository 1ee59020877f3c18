"""Does this machine draw the golden tokens? ``python -m compiled_sampler.selfcheck [--device cuda] [--backend eager]``.

One line for each backend: cases drawn, cases that differ, seconds. The exit status is 1 if any differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import torch

from compiled_sampler.selfcheck.cases import LAYOUTS, QUICK_LAYOUT, Case, Result, cases_of

DRAWS_ALL = ("reference", "eager")  # backends that compile nothing


def golden() -> dict[str, Result]:
    """The recorded results by the names of their cases."""
    text = resources.files("compiled_sampler.selfcheck").joinpath("golden.json").read_text(encoding="utf-8")
    results: dict[str, Result] = json.loads(text)
    return results


def chosen_cases(backend: str, device: str, *, every: bool) -> list[Case]:
    """The cases that a backend draws: all, or the quick ones of a backend that compiles unless ``every`` is set."""
    every = every or backend in DRAWS_ALL
    layouts = LAYOUTS if every else (QUICK_LAYOUT,)
    return [case for layout in layouts for case in cases_of(layout, backend, device) if every or case.is_quick]


def differing(cases: Sequence[Case], wanted: dict[str, Result]) -> list[str]:
    """The names of the cases whose results are not those recorded."""
    return [case.name for case in cases if case.draw() != wanted.get(case.name)]


def record(path: Path, cases: Sequence[Case]) -> None:
    """Write what the cases give, a line each."""
    lines = (f"{json.dumps(case.name)}: {json.dumps(case.draw(), separators=(',', ':'))}" for case in cases)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(prog="compiled_sampler.selfcheck", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="all", choices=("all", "reference", "eager", "compiled", "graph"))
    parser.add_argument("--every", action="store_true", help="compile and capture every case: many minutes")
    parser.add_argument("--record", type=Path, help="write the results of one backend to this file, compare nothing")
    asked = parser.parse_args(arguments)
    if asked.record is not None:
        record(
            asked.record, chosen_cases("eager" if asked.backend == "all" else asked.backend, asked.device, every=True)
        )
        return 0
    on_gpu = torch.device(asked.device).type == "cuda"
    backends = (*DRAWS_ALL, "compiled", *(("graph",) if on_gpu else ())) if asked.backend == "all" else (asked.backend,)
    wanted, failed = golden(), 0
    for backend in backends:
        start = time.perf_counter()
        cases = chosen_cases(backend, asked.device, every=asked.every)
        wrong = differing(cases, wanted)
        seconds = time.perf_counter() - start
        print(f"{backend:9} on {asked.device}: {len(cases)} cases, {len(wrong)} differ, {seconds:.1f} s", flush=True)
        for name in wrong[:10]:
            print(f"  differs: {name}")
        failed += len(wrong)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
