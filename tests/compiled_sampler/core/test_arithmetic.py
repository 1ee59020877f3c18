"""Logarithms and the root in float64: their errors everywhere, and one answer on every path, host included."""

import math
import struct
from fractions import Fraction

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_sampler.core import arithmetic as ours
from compiled_sampler.core.arithmetic import LOG2_E, log2, log2_of_number, log2_of_tensor, square_root
from compiled_sampler.lowering.compiled_stages import CompiledStages
from tests.torch_states import flushing

RELATIVE = 2.0**-50


def numbers(count, generator):
    """Of all sizes that totals have, of all near 1, and around the ends of the reduced range."""
    u = torch.rand(count, generator=generator, dtype=torch.float64)
    edges = torch.tensor([math.sqrt(0.5), math.sqrt(2.0), 1.0], dtype=torch.float64)
    steps = torch.arange(-40, 41, dtype=torch.float64)[:, None] * 2.0**-53
    return torch.cat([2.0 ** (63.0 * u), 0.5 + u, 1.0 + (u - 0.5) * 2.0**-30, (edges * (1.0 + steps)).flatten()])


def test_the_error_is_below_its_bound(generator):
    x = numbers(1000, generator)
    with mpmath.workprec(200):
        exact = [mpmath.log(mpmath.mpf(each), 2) for each in x.tolist()]
        wrong = [abs(mpmath.mpf(a) - b) > RELATIVE * abs(b) for a, b in zip(log2(x).tolist(), exact, strict=True)]
    assert not any(wrong)


def test_no_total_makes_a_logprob_positive_and_one_unit_more_is_seen(generator):
    totals = torch.cat([2**40 + torch.arange(4096), torch.randint(2**40, 2**62, (100_000,), generator=generator)])
    found = log2(totals.to(torch.float64) * 2.0**-40)
    assert (found >= 0.0).all()
    assert abs(found[1].item() - math.log1p(2.0**-40) * LOG2_E) <= 2.0**-90


def test_nothing_has_a_logarithm_that_is_a_number_and_the_root_0():
    nothing = torch.zeros(1, dtype=torch.float64)
    assert log2(nothing).isfinite().all()
    assert square_root(nothing).tolist() == [0.0]


def test_compiled_it_has_the_same_bits(generator):
    x = numbers(20_000, generator)
    assert torch.equal(CompiledStages()(log2, x).view(torch.int64), log2(x).view(torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_it_has_the_same_bits(compiled, generator):
    x = numbers(20_000, generator)
    found = CompiledStages()(log2, x.cuda()) if compiled else log2(x.cuda())
    assert torch.equal(found.cpu().view(torch.int64), log2(x).view(torch.int64))


@given(st.floats(1.0, 4.0, exclude_max=True), st.integers(-500, 500))
def test_roots_are_within_two_to_the_minus_50(mantissa, exponent):
    x = math.ldexp(mantissa, 2 * exponent)
    y = Fraction(float(square_root(torch.tensor([x], dtype=torch.float64))))
    assert abs(y * y / Fraction(x) - 1) <= Fraction(2, 2**50)


SPECIAL = (5e-324, 1.5e-323, 2.0**-1022, 2.0**-1022 - 5e-324, 2.0**-149, 0.5, 1.0 - 2.0**-53, 1.0 - 2.0**-52, 1.0)
AROUND_SQRT_HALF = tuple(struct.unpack("<d", struct.pack("<q", 0x3FE6A09E667F3BCD + step))[0] for step in range(-3, 4))


def shares(generator, count):
    """Half uniform in (0, 1], half of any binade, then the special ones: float64."""
    uniform = 1.0 - torch.rand(count, generator=generator, dtype=torch.float64)
    of_bits = torch.randint(1, 0x3FF0000000000000, (count,), generator=generator).view(torch.float64)
    return torch.cat([uniform, of_bits, torch.tensor(SPECIAL + AROUND_SQRT_HALF, dtype=torch.float64)])


def with_libm(x):
    return torch.tensor([math.log2(each) for each in x.tolist()], dtype=torch.float64)


def binade(exponent):
    """Every eighth float32 number of a binade, as float64."""
    first = (exponent + 127) << 23
    return torch.arange(first, first + (1 << 23), 8, dtype=torch.int32).view(torch.float32).to(torch.float64)


def test_the_stored_value_is_that_of_libm(generator):
    for x in (binade(-1), binade(-5), shares(generator, 500_000)):
        assert torch.equal(log2_of_tensor(x).to(torch.float32), with_libm(x).to(torch.float32))


def test_the_host_has_the_bits_of_the_device(generator):
    x = shares(generator, 20_000)
    on_host = torch.tensor([log2_of_number(each) for each in x.tolist()], dtype=torch.float64)
    assert torch.equal(on_host, log2_of_tensor(x))
    assert torch.equal(on_host, CompiledStages()(log2_of_tensor, x))


def test_the_error_of_a_parameter_is_below_six_tenths_of_an_ulp(generator):
    with mpmath.workprec(200):
        for x in shares(generator, 4000).tolist():
            found = log2_of_number(x)
            assert abs(found - mpmath.log(mpmath.mpf(x), 2)) <= 0.6 * math.ulp(found)


def test_powers_of_two_are_exact():
    exponents = torch.arange(-1022, 1024)
    assert log2(2.0 ** exponents.to(torch.float64)).tolist() == exponents.tolist()
    assert [log2_of_number(2.0**-e) for e in range(1075)] == [-float(e) for e in range(1075)]


def test_flushed_denormals_change_nothing(generator):
    x = torch.randint(1, 1 << 52, (1000,), generator=generator).view(torch.float64)
    wanted = with_libm(x).to(torch.float32)
    with flushing():
        on_device, on_host = log2_of_tensor(x).to(torch.float32), [log2_of_number(each) for each in x.tolist()]
    assert torch.equal(on_device, wanted)
    assert torch.equal(torch.tensor(on_host), wanted)


def test_the_constants_have_their_digits():
    with mpmath.workprec(200):
        c = 2 / mpmath.log(2)
        assert (float(c), float(c - ours._C_HIGH)) == (ours._C, ours._C_LOW)
        assert float(1 / mpmath.log(2)) == ours.LOG2_E
