"""Every formula that Triton has a twin of gives its bits: interpreted on the CPU, compiled on CUDA.

This file also runs as a program, which prints how many results differ under the interpreter, and how many do where a
constant of the twin is another, or the twin itself.

The interpreter computes with NumPy: each operation rounds once, and denormals stay. That a compiled kernel neither
contracts a product and a sum to an FMA nor flushes denormals, only the tests on a GPU show.
"""

import importlib
import json
import sys
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_sampler.core import filters, mass, noise, order, score
from compiled_sampler.core.rows import RowParams
from compiled_sampler.exact import row_race
from compiled_sampler.exact.triton import race as triton_race
from compiled_sampler.exact.triton import rows as triton_rows
from compiled_sampler.exact.triton.race import (
    admits,
    exponential,
    gumbel,
    gumbel_bound,
    negative_log2,
    score_key,
    token_bits,
)
from compiled_sampler.exact.triton.rows import exp2_mass, finite, mass_cut, pack, packed_id, packed_key
from tests.interpreted import run_interpreted

BLOCK = tl.constexpr(1024)

# Numbers at which a formula and its twin could differ: special ones in all combinations, and random ones, always the
# same.

SPECIAL_BITS = [
    *(0x00000000, 0x00000001, 0x00400000, 0x007FFFFF),  # +0 and denormals
    *(0x00800000, 0x33800000, 0x3F000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x40000000, 0x4B400000, 0x7F7FFFFF),
    *(0x4280000A, 0x42800000, 0x427FFFFF),  # around 64, from which on a weight is 0
    *(0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF),  # +inf and NaN with several payloads
]
"""Bits of special floats without their sign."""

SPECIAL_INTS = [
    *(0, 1, 2, 0xFF, 0x100, 0xFFFFFF, 0x1000000, 0x1000001),
    *(2**30, 2**31 - 129, 2**31 - 128, 2**31 - 2, 2**31 - 1),
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


# Twins as the kernels call them, and wrong ones.


@triton.jit
def mass_of(x, row_max, scale):
    """As the kernels call it, with the finite maximum."""
    return exp2_mass(x, finite(row_max), scale)


@triton.jit
def gumbel_of(ids, first, second, third, fourth):
    return gumbel(token_bits(ids, (first, second, third, fourth)))


@triton.jit
def bits_of(ids, first, second, third, fourth):
    return token_bits(ids, (first, second, third, fourth))


@triton.jit
def floor_cut(top_p, base):
    """A wrong twin of ``mass_cut``, which forgets to round up."""
    return (top_p * base.to(tl.float64)).to(tl.int64)


@triton.jit
def low_id(packed):
    """A wrong twin of ``packed_id``, which does not complement."""
    return packed.to(tl.int32)


@triton.jit
def low_key(packed):
    """A wrong twin of ``packed_key``."""
    return (packed >> 31).to(tl.int32)


@triton.jit
def uncomplemented(key, ids):
    """A wrong twin of ``pack``, with the ids in ascending order."""
    return (key.to(tl.int64) << 32) | ids.to(tl.int64)


@triton.jit
def of_one(a, out, size, TWIN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, TWIN(tl.load(a + at, at < size)), at < size)


@triton.jit
def of_two(a, b, out, size, TWIN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, TWIN(tl.load(a + at, at < size), tl.load(b + at, at < size)), at < size)


@triton.jit
def of_three(a, b, c, out, size, TWIN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    tl.store(out + at, TWIN(tl.load(a + at, inside), tl.load(b + at, inside), tl.load(c + at, inside)), inside)


@triton.jit
def of_five(a, b, c, d, e, out, size, TWIN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    keys = (tl.load(b + at, inside), tl.load(c + at, inside), tl.load(d + at, inside), tl.load(e + at, inside))
    tl.store(out + at, TWIN(tl.load(a + at, inside), keys[0], keys[1], keys[2], keys[3]), inside)


@triton.jit
def of_rows(
    logits, row_maxima, min_ps, scales, noise_masks, firsts, seconds, thirds, fourths, out, size, TWIN: tl.constexpr
):
    """A row a program; ``TWIN`` is 0 for ``admits``, 1 for ``score_key``, by the tokens' places as ids."""
    row = tl.program_id(0)
    row_max, min_p = finite(tl.load(row_maxima + row)), tl.load(min_ps + row)
    scale, noise_mask = tl.load(scales + row), tl.load(noise_masks + row)
    first, second = tl.load(firsts + row), tl.load(seconds + row)
    third, fourth = tl.load(thirds + row), tl.load(fourths + row)
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < size
        x = tl.load(logits + row * size + ids, inside, other=0.0)
        if TWIN == 0:
            key = admits(x, row_max, min_p, scale).to(tl.int32)
        else:
            key = score_key(x, ids, inside, (row_max, min_p, scale, noise_mask, (first, second, third, fourth)))
        tl.store(out + row * size + ids, key, inside)


def as_rows(min_p: Tensor, scale: Tensor, noise_mask: Tensor, row_keys: tuple[Tensor, ...]) -> RowParams:
    unread = torch.zeros_like(scale)
    return RowParams(unread, unread, noise.NoiseKeys(*row_keys), scale, noise_mask, unread, unread, min_p)


def torch_admits(x: Tensor, row_max: Tensor, min_p: Tensor, scale: Tensor, mask: Tensor, *row_keys: Tensor) -> Tensor:
    every = order.indices(x.shape[1], x.device)
    return score.admitted(x, every, as_rows(min_p, scale, mask, row_keys), row_max, None).to(torch.int32)


def torch_score(x: Tensor, row_max: Tensor, min_p: Tensor, scale: Tensor, mask: Tensor, *row_keys: Tensor) -> Tensor:
    every = order.indices(x.shape[1], x.device)
    return score.admitted_key(x, every, as_rows(min_p, scale, mask, row_keys), row_max, None)


class Twin(NamedTuple):
    """A formula of torch, its twin, inputs that try both, and a change of the twin that has to be noticed."""

    definition: Callable[..., Tensor]
    kernel: Any
    twin: Any
    inputs: Callable[[], Any]
    wrong: Any
    """A constant of the twin's module by name, the number added to it; or another twin."""


TWINS: dict[str, Twin] = {
    "order_key": Twin(order.order_key, of_one, triton_rows.order_key, floats, (triton_rows, "ID_MASK", -1)),
    "key_float": Twin(order.key_float, of_one, triton_rows.key_float, words, (triton_rows, "MASKED_KEY", 1)),
    "pack": Twin(order.pack, of_two, pack, lambda: (words(), ids().flip(0)), uncomplemented),
    "packed_key": Twin(order.packed_key, of_one, packed_key, packed, low_key),
    "packed_id": Twin(lambda each: order.packed_id(each).to(torch.int32), of_one, packed_id, packed, low_id),
    "mass": Twin(
        lambda x, row_max, scale: mass.exp2_mass(mass.scaled_logits(x, row_max, scale)),
        *(of_three, mass_of, masses, (triton_rows, "_C5", 2.0**-14)),
    ),
    "mass_cut": Twin(filters.mass_cut, of_two, mass_cut, cuts, floor_cut),
    "token_bits": Twin(
        lambda ids, *keys: noise.token_bits(noise.NoiseKeys(*keys), ids),
        *(of_five, bits_of, keyed_ids, (triton_race, "_MIX_2", 2)),
    ),
    "exponential": Twin(noise.exponential, of_one, exponential, words, (triton_race, "_H5", 2.0**-20)),
    "negative_log2": Twin(
        noise.negative_log2, of_one, negative_log2, normal_numbers, (triton_race, "_L3", -(2.0**-20))
    ),
    "gumbel": Twin(
        lambda ids, *keys: noise.gumbel(noise.NoiseKeys(*keys), ids),
        *(of_five, gumbel_of, keyed_ids, (triton_race, "_H0", 2.0**-20)),
    ),
    "gumbel_bound": Twin(noise.bound_of, of_two, gumbel_bound, bounded, (triton_race, "_BOUND", 2.0**-15)),
    "min_p": Twin(torch_admits, of_rows, 0, rows, 1),
    "score": Twin(torch_score, of_rows, 1, rows, (triton_race, "_BITS_OF_128", 1)),
}


def bits(x: Tensor) -> Tensor:
    """The numbers as integers, so that NaN and signs of zeros compare."""
    return x.view(torch.int32) if x.dtype == torch.float32 else x


def differing(name: str, device: str, twin: Any = None) -> int:
    """How many results differ between torch's definition, on the CPU, and its twin, or another one in place of it."""
    case = TWINS[name]
    inputs = case.inputs()
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    wanted = case.definition(*inputs)
    out = torch.empty(wanted.shape, dtype=wanted.dtype, device=device)
    size = wanted.shape[-1]
    programs = wanted.shape[0] if wanted.dim() == 2 else triton.cdiv(size, BLOCK.value)
    twin = case.twin if twin is None else twin
    case.kernel[(programs,)](*(each.to(device) for each in inputs), out, size, TWIN=twin, enable_fp_fusion=False)
    return int((bits(out.cpu()) != bits(wanted)).sum())


def differing_if_wrong(name: str, device: str) -> int:
    """How many results differ of a twin that is wrong; a constant can be another only under the interpreter."""
    wrong = TWINS[name].wrong
    if not isinstance(wrong, tuple):
        return differing(name, device, wrong)
    module, constant, added = wrong
    with mock.patch.object(module, constant, tl.constexpr(getattr(module, constant).value + added)):
        return differing(name, device)


def main() -> None:
    found = {name: (differing(name, "cpu"), differing_if_wrong(name, "cpu")) for name in TWINS}
    json.dump(found, sys.stdout)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = run_interpreted(__file__)
    return found


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_gives_the_bits_of_its_definition_interpreted(interpreted, name):
    assert interpreted[name][0] == 0


@pytest.mark.parametrize("name", TWINS)
def test_a_wrong_twin_is_noticed(interpreted, name):
    assert interpreted[name][1] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", TWINS)
def test_a_twin_gives_the_bits_of_its_definition(name):
    assert differing(name, "cuda") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, twin in TWINS.items() if not isinstance(twin.wrong, tuple)])
def test_a_wrong_twin_is_noticed_on_cuda(name):
    assert differing_if_wrong(name, "cuda") > 0


def test_constants_are_those_of_torch():
    magnitude = order.magnitude_bits(torch.tensor(-torch.nan).view(torch.int32).fill_(-1).view(torch.float32)).item()
    largest = torch.finfo(torch.float32).max
    values = {
        "MASKED_KEY": order.MASKED_KEY,
        "LOWEST_KEY": order.MASKED_KEY + 1,
        "HIGHEST_KEY": torch.iinfo(torch.int32).max,
        "POSITIVE_INFINITY_KEY": order.order_key(torch.tensor(torch.inf)).item(),
        "FLOAT_MAX_KEY": order.order_key(torch.tensor(largest)).item(),
        "ID_MASK": magnitude,
        "KEEP_ALL": filters.KEEP_ALL,
        "NO_WINNER": row_race.NO_WINNER,
        "UNKNOWN_WINNER": torch.iinfo(torch.int64).max,
    }
    assert {name: getattr(triton_rows, name).value for name in values} == values


def test_a_name_means_the_same_in_every_kernel():
    # Inductor copies what a kernel calls into one module, by name, and takes the first of two
    meanings: dict[str, Any] = {}
    for room in ("rows", "race", "winner", "search", "bracket", "measure", "finish"):
        module = importlib.import_module(f"compiled_sampler.exact.triton.{room}")
        for name, meaning in vars(module).items():
            if isinstance(meaning, tl.constexpr | triton.JITFunction):
                said = meaning.value if isinstance(meaning, tl.constexpr) else meaning
                assert meanings.setdefault(name, said) == said, name
    assert len(meanings) > 60


if __name__ == "__main__":
    main()
