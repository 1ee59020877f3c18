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
from tests.cases.special_values import (
    bounded,
    cuts,
    floats,
    ids,
    keyed_ids,
    masses,
    normal_numbers,
    packed,
    rows,
    words,
)
from tests.interpreted import run_interpreted

BLOCK = tl.constexpr(1024)


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
