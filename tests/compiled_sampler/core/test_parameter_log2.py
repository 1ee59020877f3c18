"""One logarithm for host and device: the float32 that libm's gives, and the same float64 on both sides."""

import math
import struct

import mpmath
import pytest
import torch
from torch import Tensor

from compiled_sampler.core import arithmetic as ours
from compiled_sampler.core.arithmetic import log2_of_number, log2_of_tensor
from compiled_sampler.lowering.compiled_stages import CompiledStages

SPECIAL = (5e-324, 1.5e-323, 2.0**-1022, 2.0**-1022 - 5e-324, 2.0**-149, 0.5, 1.0 - 2.0**-53, 1.0 - 2.0**-52, 1.0)
AROUND_SQRT_HALF = tuple(struct.unpack("<d", struct.pack("<q", 0x3FE6A09E667F3BCD + step))[0] for step in range(-3, 4))


def numbers(generator: torch.Generator, count: int) -> Tensor:
    """Half uniform in (0, 1], half of any binade, then the special ones: float64."""
    uniform = 1.0 - torch.rand(count, generator=generator, dtype=torch.float64)
    of_bits = torch.randint(1, 0x3FF0000000000000, (count,), generator=generator).view(torch.float64)
    return torch.cat([uniform, of_bits, torch.tensor(SPECIAL + AROUND_SQRT_HALF, dtype=torch.float64)])


def with_libm(x: Tensor) -> Tensor:
    return torch.tensor([math.log2(each) for each in x.tolist()], dtype=torch.float64)


def binade(exponent: int) -> Tensor:
    """Every eighth float32 number of a binade, as float64."""
    first = (exponent + 127) << 23
    return torch.arange(first, first + (1 << 23), 8, dtype=torch.int32).view(torch.float32).to(torch.float64)


@pytest.mark.parametrize("exponent", [-1, -2, -5, -100])
def test_for_float32_numbers_the_stored_value_is_that_of_libm(exponent):
    x = binade(exponent)
    assert torch.equal(log2_of_tensor(x).to(torch.float32), with_libm(x).to(torch.float32))


def test_for_float64_numbers_the_stored_value_is_that_of_libm(generator):
    x = numbers(generator, 500_000)
    assert torch.equal(log2_of_tensor(x).to(torch.float32), with_libm(x).to(torch.float32))


def test_the_host_has_the_bits_of_the_device(generator):
    x = numbers(generator, 50_000)
    on_host = torch.tensor([log2_of_number(each) for each in x.tolist()], dtype=torch.float64)
    assert torch.equal(on_host, log2_of_tensor(x))
    assert torch.equal(on_host, CompiledStages()(log2_of_tensor, x))


def test_the_error_is_below_six_tenths_of_an_ulp(generator):
    with mpmath.workprec(200):
        for x in numbers(generator, 4000).tolist():
            found = log2_of_number(x)
            assert abs(found - mpmath.log(mpmath.mpf(x), 2)) <= 0.6 * math.ulp(found)


def test_powers_of_two_are_exact():
    assert [log2_of_number(2.0**-e) for e in range(1075)] == [-float(e) for e in range(1075)]


def test_flushed_denormals_change_nothing(generator):
    x = torch.randint(1, 1 << 52, (1000,), generator=generator).view(torch.float64)
    wanted = with_libm(x).to(torch.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        on_device, on_host = log2_of_tensor(x).to(torch.float32), [log2_of_number(each) for each in x.tolist()]
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(on_device, wanted)
    assert torch.equal(torch.tensor(on_host), wanted)


def test_the_constants_have_their_digits():
    with mpmath.workprec(200):
        c = 2 / mpmath.log(2)
        assert (float(c), float(c - ours._C_HIGH)) == (ours._C, ours._C_LOW)
        assert float(1 / mpmath.log(2)) == ours.LOG2_E
