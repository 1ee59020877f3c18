"""Numbers at which a formula and its twin could differ: the inputs of ``test_triton_twins.py``.

Each function gives tensors on the CPU, the same ones every time: special values in all combinations, and random ones.
"""

from itertools import product

import torch
from torch import Tensor

from compiled_sampler.core import order

SPECIAL_BITS = [
    *(0x00000000, 0x00000001, 0x00400000, 0x007FFFFF),  # +0 and denormals
    *(0x00800000, 0x33800000, 0x3F000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x40000000, 0x4B400000, 0x7F7FFFFF),
    *(0x4280000A, 0x42800000, 0x427FFFFF),  # around 64, from which on a weight is 0
    *(0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF),  # +inf and NaN with several payloads
]
"""Bits of special floats without their sign."""

SPECIAL_INTS = [
    0,
    1,
    2,
    0xFF,
    0x100,
    0xFFFFFF,
    0x1000000,
    0x1000001,
    2**30,
    2**31 - 129,
    2**31 - 128,
    2**31 - 2,
    2**31 - 1,
]
"""Words around the boundaries at which a conversion to float32 rounds, without their complements."""

RANDOM = 4000
SCALES = (1.442695, 1.0, 0.1, 144269.5, 1.4e-30, 1.4426951e30)


def floats() -> Tensor:
    """Float32: special ones of either sign, and random bits."""
    bits = torch.tensor([*SPECIAL_BITS, *(each - 2**31 for each in SPECIAL_BITS)], dtype=torch.int32)
    return torch.cat([bits, words()]).view(torch.float32)


def words() -> Tensor:
    """Int32: boundaries, their complements, and random words over all 32 bits."""
    special = [*SPECIAL_INTS, *(~each for each in SPECIAL_INTS)]
    random = torch.randint(-(2**31), 2**31, (RANDOM,), generator=torch.Generator().manual_seed(1))
    return torch.cat([torch.tensor(special), random]).to(torch.int32)


def ids() -> Tensor:
    """Int32 token ids, from 0 to the largest."""
    return words() & 0x7FFFFFFF


def pairs(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """All of ``a`` with each of ``b``."""
    return a.repeat(len(b)), b.repeat_interleave(len(a))


def masses() -> tuple[Tensor, ...]:
    """Logits, maxima and scales: special ones in all combinations, and random ones up to 100 below the maximum."""
    special = floats()[: 2 * len(SPECIAL_BITS)]
    x, row_max = pairs(special, special[~special.isnan()])
    every, scale = pairs(torch.arange(len(x)), torch.tensor(SCALES))
    generator = torch.Generator().manual_seed(2)
    row_maxima = 8.0 * torch.randn(20 * RANDOM, generator=generator)
    below = row_maxima - 70.0 * torch.rand(20 * RANDOM, generator=generator)
    usual = (below, row_maxima, torch.full_like(below, 1.442695))
    return tuple(torch.cat(each) for each in zip((x[every], row_max[every], scale), usual, strict=True))


def cuts() -> tuple[Tensor, Tensor]:
    """``top_p`` below 1 and masses, of which many products are integers, or as near as float64 allows."""
    top_p = [1.0 - 2.0**-53, 1.0 - 2.0**-52, 0.5, 0.5 + 2.0**-53, 0.25, 0.9, 0.1, 1e-9, 5e-324, 2.0**-40, 1.0 / 3.0]
    base = [0, 1, 2, 3, 10, 2**40 - 1, 2**40, 2**40 + 1, 3 * 2**40, 2**53 - 1, 2**53, 2**53 + 1, 151_936 << 40]
    base += torch.randint(0, 2**57, (RANDOM,), generator=torch.Generator().manual_seed(3)).tolist()
    return pairs(torch.tensor(top_p, dtype=torch.float64), torch.tensor(base))


def packed() -> Tensor:
    """Packed keys of words and ids, and the smallest and the largest number."""
    return torch.cat([order.pack(words(), ids().flip(0)), torch.tensor([-(2**63), 2**63 - 1])])


def keyed_ids() -> tuple[Tensor, ...]:
    """Ids and the four keys, the first of which is odd."""
    return ids(), words().flip(0) | 1, words().roll(7), words().roll(-99), words().roll(1234)


def bounded() -> tuple[Tensor, Tensor]:
    """Words, and whether there is noise."""
    return pairs(words(), torch.tensor([0.0, 1.0]))


def normal_numbers() -> Tensor:
    """Positive normal float32 numbers, as ``negative_log2`` takes them; boundaries of every exponent are among them."""
    bits = torch.cat([(torch.arange(1, 255) << 23) + each for each in (0, 1, 0x400000, 0x7FFFFF)])
    return torch.cat([bits.to(torch.int32), floats().view(torch.int32) % 0x7F000000 + 0x800000]).view(torch.float32)


def rows() -> tuple[Tensor, ...]:
    """Logits ``[R, V]`` and the parameters of rows: every scale, min_p, with noise and without, of special maxima."""
    kinds = list(product(SCALES, (-torch.inf, -10.0, -0.5, 0.0), (0, -1), (3.0, torch.inf, -1e38, 0.0)))
    scale, min_p, noise_mask, row_max = (torch.tensor(each) for each in zip(*kinds, strict=True))
    generator = torch.Generator().manual_seed(4)
    usual = row_max.clamp(-1e37, 1e37)[:, None] - 9.0 * torch.rand(len(kinds), 600, generator=generator)
    logits = torch.cat([floats()[: 2 * len(SPECIAL_BITS)].expand(len(kinds), -1), usual], -1)
    logits = torch.where(logits > row_max[:, None], row_max[:, None], logits)  # a NaN stays
    row_keys = (each[: len(kinds)] for each in keyed_ids()[1:])
    return logits.contiguous(), row_max, min_p, scale, noise_mask.to(torch.int32), *row_keys
