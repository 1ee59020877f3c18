"""Are the bits behind the noise random: along a row, along positions and seeds, and between tokens?

Command line::

    python -m tools.test_generator [--json FILE]              avalanche, uniformity, joint laws
    python -m tools.test_generator --dieharder row ids seeds  also every test of dieharder on these streams
    python -m tools.test_generator --raw row | some_battery   32-bit words without end, for another battery of tests

Dims: ``R`` rows, ``n`` tokens of a row. A p-value is suspicious outside [1e-4, 1 - 1e-4] and a failure below 1e-8.
Streams: ``row`` is all ids of consecutive positions, ``ids`` is 64 scattered ids of consecutive positions, ``seeds``
the same of consecutive seeds; dieharder needs an hour for each. The control is a mix with one multiplication: the joint
laws must find it out.
"""

import argparse
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import scipy
import torch
from rich.console import Console
from rich.table import Table
from scipy import stats
from torch import Tensor

from compiled_sampler.core.noise import STREAM_VERSION, TARGET, NoiseKeys, noise_keys, token_bits
from tools.measurement import environment, write_json

ROOT = Path(__file__).resolve().parents[1]

V = 151_936
SEED = 42
SUSPICIOUS, FAILURE = 1e-4, 1e-8
MOST_SHOWN = 12
STREAMS = ("row", "ids", "seeds")
SCATTERED = torch.tensor(
    [0, *(2**k for k in range(18)), *range(3, 1024, 40), *range(99, V, 8000)][:64], dtype=torch.int32
)
JOINT = [
    *((0, 2**k) for k in range(18)),
    (5, 1234),
    (0, 1, 2),
    (0, 2**15, 2**16),
    (0, 2**16, 2**17),
    (0, 1, 2, 3),
    (0, 256, 512, 768),
    (0, 2**15, 2**16, 3 * 2**15),
    (7, 99, 5000, 150_000),
]

Mix = Callable[[NoiseKeys, Tensor], Tensor]


@dataclass
class Finding:
    """The outcome of one test."""

    group: str
    test: str
    samples: int
    p_value: float
    verdict: str = ""

    def __post_init__(self) -> None:
        """Judge the p-value."""
        side = min(self.p_value, 1.0 - self.p_value)
        self.verdict = "FAILED" if self.p_value < FAILURE else "suspicious" if side < SUSPICIOUS else "passed"


def one_multiplication(keys: NoiseKeys, ids: Tensor) -> Tensor:
    """The control: too weak a mix."""
    h = (ids ^ keys.first) * 0x7FEB352D + keys.second
    return h ^ ((h >> 16) & 0xFFFF)


def unsigned(bits: Tensor) -> Tensor:
    """Int32 bits as int64 in ``[0, 2**32)``."""
    return bits.to(torch.int64) & 0xFFFFFFFF


def keys_along(axis: str, start: int, count: int) -> NoiseKeys:
    """Keys ``[count]`` of consecutive positions or of consecutive seeds."""
    moving = torch.arange(start, start + count)
    fixed = torch.full_like(moving, SEED)
    seeds, positions = (moving, fixed) if axis == "seeds" else (fixed, moving)
    return noise_keys(seeds, positions, TARGET)


def chi_square(cells: Tensor, num_cells: int) -> float:
    """P-value of uniform cells."""
    counts = torch.bincount(cells.flatten(), minlength=num_cells).to(torch.float64)
    expected = cells.numel() / num_cells
    return float(stats.chi2.sf(float(((counts - expected) ** 2).sum()) / expected, num_cells - 1))


def worst_p_value(flips: Tensor, samples: int) -> float:
    """P-value of the largest deviation from 1/2 among flip counts, by the normal law of each and their number."""
    z = float((flips.to(torch.float64) - samples / 2).abs().max()) / (math.sqrt(samples) / 2)
    return float(-math.expm1(flips.numel() * math.log1p(-2.0 * stats.norm.sf(z))))


def flip_counts(before: Tensor, after: Tensor) -> Tensor:
    """How often each of the 32 output bits changed: int64 ``[32]``."""
    return ((before ^ after)[:, None] >> torch.arange(32) & 1).sum(0)


def avalanche(samples: int) -> Iterator[Finding]:
    """Flip each bit of the id, the seed and the position: every output bit flips half of the time."""
    draw = torch.Generator().manual_seed(1)
    words = [torch.randint(-(2**63), 2**63 - 1, (samples,), generator=draw) for _ in range(2)]
    seeds, positions = words[0], words[1] & (2**62 - 1)
    ids = torch.randint(0, V, (samples,), generator=draw, dtype=torch.int32)
    keys = noise_keys(seeds, positions, TARGET)
    before = unsigned(token_bits(keys, ids))

    def flipped(name: str, bit: int) -> Tensor:
        if name == "id":
            return token_bits(keys, ids ^ (1 << bit))
        flip = torch.tensor(1) << bit
        moved = (seeds ^ flip, positions) if name == "seed" else (seeds, positions ^ flip)
        return token_bits(noise_keys(*moved, TARGET), ids)

    for name, width in (("id", 18), ("seed", 64), ("position", 62)):
        counts = torch.stack([flip_counts(before, unsigned(flipped(name, bit))) for bit in range(width)])
        deviation = float((counts / samples - 0.5).abs().max())
        test = f"{name}: {width} x 32 bits, largest deviation from 1/2 is {deviation:.4f}"
        yield Finding("avalanche", test, samples, worst_p_value(counts, samples))


def uniformity(samples: int) -> Iterator[Finding]:
    """Chi-square of the high, middle and low 12 bits along ids, positions and seeds."""
    rows = keys_along("positions", 0, -(-samples // V))
    along = {
        "ids": token_bits(NoiseKeys(*(key[:, None] for key in rows)), torch.arange(V, dtype=torch.int32)).flatten(),
        "positions": token_bits(keys_along("positions", 0, samples), torch.tensor(7, dtype=torch.int32)),
        "seeds": token_bits(keys_along("seeds", -samples // 2, samples), torch.tensor(7, dtype=torch.int32)),
    }
    for name, bits in along.items():
        for shift in (20, 10, 0):
            p_value = chi_square(unsigned(bits) >> shift & 4095, 4096)
            yield Finding("uniformity", f"{name}, bits {shift} to {shift + 11}", bits.numel(), p_value)


def joint_laws(group: str, mix: Mix, keys: NoiseKeys, shifts: tuple[int, ...] = (0, 1)) -> Iterator[Finding]:
    """Chi-square of the high (0) or low (1) bits of two to four tokens of a row, over rows."""
    for ids in JOINT:
        width = 16 // len(ids)
        words = [unsigned(mix(keys, torch.tensor(i, dtype=torch.int32))) for i in ids]
        for low in shifts:
            cells = torch.zeros_like(words[0])
            for word in words:
                cells = cells << width | (word & (2**width - 1) if low else word >> (32 - width))
            name = f"ids {', '.join(map(str, ids))}: {'low' if low else 'high'} {width} bits of each"
            yield Finding(group, name, cells.numel(), chi_square(cells, 2 ** (width * len(ids))))


def stream(name: str) -> Iterator[bytes]:
    """The words of a stream without end, in the machine's byte order."""
    ids, rows = (torch.arange(V, dtype=torch.int32), 8) if name == "row" else (SCATTERED, 2**15)
    axis = "seeds" if name == "seeds" else "positions"
    start = 0
    while True:
        keys = keys_along(axis, start, rows)
        start += rows
        yield token_bits(NoiseKeys(*(key[:, None] for key in keys)), ids).numpy().tobytes()


def dieharder(name: str) -> Iterator[Finding]:
    """Every test of dieharder on a stream."""
    program = shutil.which("dieharder")
    if program is None:
        raise SystemExit("dieharder is not installed; apt-get install dieharder, or leave --dieharder out")
    command = [program, "-a", "-g", "200", "-D", "test_name", "-D", "ntuple", "-D", "pvalues"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        feeder = subprocess.Popen(
            [sys.executable, "-m", "tools.test_generator", "--raw", name],
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
