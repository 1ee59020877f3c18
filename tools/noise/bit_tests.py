"""Tests of the bits behind the noise: avalanche, uniformity, and joint laws of the tokens of a row.

Dims: ``R`` rows, ``n`` tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from compiled_sampler.core.noise import TARGET, NoiseKeys, noise_keys, token_bits

V = 151_936

SEED = 42

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
