"""Are the bits behind the noise random: along a row, along positions and seeds, and between tokens?

    python -m tools.noise [--json FILE]                     avalanche, uniformity, joint laws
    python -m tools.noise --dieharder row ids seeds         also every test of dieharder on these streams, an hour each
    python -m tools.noise --raw row | some_battery          32-bit words without end, for another battery of tests

A p-value is suspicious outside [1e-4, 1 - 1e-4] and a failure below 1e-8. The control is a mix with one multiplication,
which the joint laws must find. The exit status is 1 if a test fails or the control passes.

Streams: ``row`` is all ids of consecutive positions, ``ids`` is 64 scattered ids of consecutive positions, ``seeds``
the same ids of consecutive seeds. Dims: ``R`` rows, ``n`` tokens of a row.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from scipy import stats
from torch import Tensor

from compiled_sampler.core.noise import STREAM_VERSION, TARGET, NoiseKeys, noise_keys, token_bits
from tools.measuring import environment, write_json

ROOT = Path(__file__).resolve().parents[1]
V, SEED = 151_936, 42
SUSPICIOUS, FAILURE = 1e-4, 1e-8
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
"""Token ids whose bits are looked at together; they differ in one bit where a weak mix is worst."""

Mix = Callable[[NoiseKeys, Tensor], Tensor]


@dataclass
class Finding:
    """The outcome of one test."""

    group: str
    test: str
    samples: int
    p_value: float

    @property
    def verdict(self) -> str:
        """By the p-value."""
        side = min(self.p_value, 1.0 - self.p_value)
        return "FAILED" if self.p_value < FAILURE else "suspicious" if side < SUSPICIOUS else "passed"


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


def avalanche(samples: int) -> Iterator[Finding]:
    """Flip each bit of the id, the seed and the position: every output bit flips half of the time."""
    draw = torch.Generator().manual_seed(1)
    seeds, positions = (torch.randint(-(2**63), 2**63 - 1, (samples,), generator=draw) for _ in range(2))
    positions &= 2**62 - 1
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
        changes = (before ^ unsigned(flipped(name, bit)) for bit in range(width))
        counts = torch.stack([(change[:, None] >> torch.arange(32) & 1).sum(0) for change in changes])
        deviation = float((counts / samples - 0.5).abs().max())
        # the largest of so many deviations, each normal
        log_below = math.log1p(-2.0 * stats.norm.sf(deviation * 2 * math.sqrt(samples)))
        test = f"{name}: {width} x 32 bits, largest deviation from 1/2 is {deviation:.4f}"
        yield Finding("avalanche", test, samples, -math.expm1(counts.numel() * log_below))


def uniformity(samples: int) -> Iterator[Finding]:
    """Chi-square of the high, middle and low 12 bits along ids, positions and seeds."""
    rows = keys_along("positions", 0, -(-samples // V))
    one_id = torch.tensor(7, dtype=torch.int32)
    along = {
        "ids": token_bits(NoiseKeys(*(key[:, None] for key in rows)), torch.arange(V, dtype=torch.int32)).flatten(),
        "positions": token_bits(keys_along("positions", 0, samples), one_id),
        "seeds": token_bits(keys_along("seeds", -samples // 2, samples), one_id),
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


def write_stream(name: str) -> None:
    """Write the words of a stream, in the machine's byte order, until the reader has enough."""
    ids, rows = (torch.arange(V, dtype=torch.int32), 8) if name == "row" else (SCATTERED, 2**15)
    start = 0
    try:
        while True:
            keys = keys_along("seeds" if name == "seeds" else "positions", start, rows)
            start += rows
            sys.stdout.buffer.write(token_bits(NoiseKeys(*(key[:, None] for key in keys)), ids).numpy().tobytes())
    except BrokenPipeError:
        sys.stderr.close()  # or Python complains of the pipe once more when it ends


def dieharder(name: str) -> Iterator[Finding]:
    """Every test of dieharder on a stream."""
    program = shutil.which("dieharder")
    if program is None:
        raise SystemExit("dieharder is not installed; apt-get install dieharder, or leave --dieharder out")
    writing = [sys.executable, "-m", "tools.noise", "--raw", name]
    testing = [program, "-a", "-g", "200", "-D", "test_name", "-D", "ntuple", "-D", "pvalues"]
    with (
        subprocess.Popen(writing, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as writer,
        subprocess.Popen(testing, stdin=writer.stdout, stdout=subprocess.PIPE, text=True) as tester,
    ):
        assert writer.stdout
        assert tester.stdout
        writer.stdout.close()  # dieharder alone reads it, so its end is the writer's
        for line in tester.stdout:
            fields = line.replace(" ", "").strip().split("|")
            if len(fields) >= 3 and not fields[0].startswith(("#", "test_name")):
                yield Finding(f"dieharder, stream {name}", f"{fields[0]}({fields[1]})", 0, float(fields[2]))
    if tester.returncode:
        raise SystemExit(f"dieharder ended with status {tester.returncode} on stream {name}; findings are missing")


def report(findings: list[Finding]) -> Table:
    """A row for each group, and one for each test that did not pass."""
    table = Table("group", "tests", "smallest p", "largest p", "suspicious", "failed", title="random bits")
    for group in dict.fromkeys(finding.group for finding in findings):
        members = [finding for finding in findings if finding.group == group]
        values = [finding.p_value for finding in members]
        marks = [sum(f.verdict == verdict for f in members) for verdict in ("suspicious", "FAILED")]
        table.add_row(group, str(len(members)), f"{min(values):.3g}", f"{max(values):.6g}", *map(str, marks))
    for finding in findings:
        if finding.verdict != "passed" and finding.group != "control":
            table.add_row(f"  {finding.verdict}", finding.test, f"{finding.p_value:.3g}")
    return table


def main() -> int:
    """Test, print, store; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2**23, help="rows of a joint law, draws of a chi-square")
    parser.add_argument("--dieharder", nargs="+", default=[], choices=STREAMS, help="streams for all of dieharder")
    parser.add_argument("--raw", choices=STREAMS, help="only write this stream to the standard output")
    parser.add_argument("--json", help="store the findings in this file")
    options = parser.parse_args()
    if options.raw:
        write_stream(options.raw)
        return 0
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
        facts = {**environment("cpu"), "stream_version": STREAM_VERSION}
        write_json(options.json, {**facts, "findings": [{**asdict(f), "verdict": f.verdict} for f in findings]})
    failed = any(f.verdict == "FAILED" for f in findings if f.group != "control")
    detected = any(f.verdict == "FAILED" for f in findings if f.group == "control")
    return int(failed or not detected)


if __name__ == "__main__":
    sys.exit(main())
