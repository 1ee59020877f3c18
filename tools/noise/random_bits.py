"""Are the bits behind the noise random: along a row, along positions and seeds, and between tokens?

Command line::

    python -m tools.noise.random_bits [--json FILE]              avalanche, uniformity, joint laws
    python -m tools.noise.random_bits --dieharder row ids seeds  also every test of dieharder on these streams
    python -m tools.noise.random_bits --raw row | some_battery   32-bit words without end, for another battery of tests

Dims: ``R`` rows, ``n`` tokens of a row. A p-value is suspicious outside [1e-4, 1 - 1e-4] and a failure below 1e-8.
Streams: ``row`` is all ids of consecutive positions, ``ids`` is 64 scattered ids of consecutive positions, ``seeds``
the same of consecutive seeds; dieharder needs an hour for each. The control is a mix with one multiplication: the joint
laws must find it out.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import scipy
from rich.console import Console
from rich.table import Table

from compiled_sampler.core.noise import STREAM_VERSION, NoiseKeys, token_bits
from tools.measuring.environment import environment, write_json
from tools.noise.bit_tests import (
    STREAMS,
    Finding,
    avalanche,
    joint_laws,
    keys_along,
    one_multiplication,
    stream,
    uniformity,
)

ROOT = Path(__file__).resolve().parents[2]

MOST_SHOWN = 12


def dieharder(name: str) -> Iterator[Finding]:
    """Every test of dieharder on a stream."""
    program = shutil.which("dieharder")
    if program is None:
        raise SystemExit("dieharder is not installed; apt-get install dieharder, or leave --dieharder out")
    command = [program, "-a", "-g", "200", "-D", "test_name", "-D", "ntuple", "-D", "pvalues"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        feeder = subprocess.Popen(
            [sys.executable, "-m", "tools.noise.random_bits", "--raw", name],
            stdout=process.stdin,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )
        process.stdin.close()
        for line in process.stdout:
            fields = line.decode().replace(" ", "").strip().split("|")
            if len(fields) >= 3 and not fields[0].startswith(("#", "test_name")):
                yield Finding(f"dieharder, stream {name}", f"{fields[0]}({fields[1]})", 0, float(fields[2]))
        feeder.terminate()
        feeder.wait()
    if process.returncode:
        raise SystemExit(f"dieharder ended with status {process.returncode} on stream {name}; its findings are not all")


def report(findings: list[Finding]) -> Table:
    """A row for each group, and one for each of the worst findings that did not pass."""
    table = Table("group", "tests", "smallest p", "largest p", "suspicious", "failed", title="random bits")
    for group in dict.fromkeys(finding.group for finding in findings):
        members = [finding for finding in findings if finding.group == group]
        values = [finding.p_value for finding in members]
        marks = [sum(f.verdict == verdict for f in members) for verdict in ("suspicious", "FAILED")]
        table.add_row(group, str(len(members)), f"{min(values):.3g}", f"{max(values):.6g}", *map(str, marks))
    bad = [finding for finding in findings if finding.verdict != "passed" and finding.group != "control"]
    for finding in sorted(bad, key=lambda finding: finding.p_value)[:MOST_SHOWN]:
        table.add_row(f"  {finding.verdict}", finding.test, f"{finding.p_value:.3g}")
    return table


def provenance() -> dict[str, str | int]:
    """When, with what, and of which commit."""
    libraries = {"numpy": np.__version__, "scipy": scipy.__version__}
    return {**environment("cpu"), **libraries, "stream_version": STREAM_VERSION}


def main() -> int:
    """1 where a test failed or the control passed, else 0."""
    parser = argparse.ArgumentParser(description="Test the generator behind the noise.", allow_abbrev=False)
    parser.add_argument(
        "--samples", type=int, default=2**23, help="rows of each joint law and draws of each chi-square"
    )
    parser.add_argument("--dieharder", nargs="+", default=[], choices=STREAMS, help="streams for all of dieharder")
    parser.add_argument("--raw", choices=STREAMS, help="only write this stream to the standard output")
    parser.add_argument("--json", help="store the findings in this file")
    options = parser.parse_args()
    if options.raw:
        return write_raw(options.raw)
    keys = keys_along("positions", 0, options.samples)
    findings = [
        *avalanche(min(options.samples, 2**16)),
        *uniformity(options.samples),
        *joint_laws("joint laws over positions", token_bits, keys),
        *joint_laws("joint laws over seeds", token_bits, keys_along("seeds", 0, options.samples)),
        *joint_laws("control", one_multiplication, NoiseKeys(*(key[: 2**20] for key in keys)), (0,)),
        *(finding for name in options.dieharder for finding in dieharder(name)),
    ]
    Console().print(report(findings))
    if options.json:
        write_json(options.json, {**provenance(), "findings": [asdict(finding) for finding in findings]})
    failed = any(f.verdict == "FAILED" for f in findings if f.group != "control")
    detected = any(f.verdict == "FAILED" for f in findings if f.group == "control")
    return int(failed or not detected)


def write_raw(name: str) -> int:
    """Write a stream until its reader has had enough."""
    try:
        for chunk in stream(name):
            sys.stdout.buffer.write(chunk)
    except BrokenPipeError:
        sys.stderr.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
