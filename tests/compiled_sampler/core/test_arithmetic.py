"""Logarithm and root in float64: their errors everywhere, and one answer on every path."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_sampler.core.arithmetic import LN2, LOG2_E, log2, square_root
from compiled_sampler.lowering.compiled_stages import CompiledStages

RELATIVE = 2.0**-50


def numbers(count: int, generator: torch.Generator) -> torch.Tensor:
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


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="a long double is a double here")
def test_the_error_is_below_its_bound_for_very_many_numbers(generator):
    x = numbers(500_000, generator)
    exact = np.log2(x.numpy().astype(np.longdouble))
    assert (np.abs(log2(x).numpy() - exact) <= RELATIVE * np.abs(exact)).all()


def test_powers_of_two_are_exact():
    exponents = torch.arange(-1022, 1024)
    assert log2(2.0 ** exponents.to(torch.float64)).tolist() == exponents.tolist()


def test_no_total_makes_a_logprob_positive(generator):
    totals = torch.cat([2**40 + torch.arange(4096), torch.randint(2**40, 2**62, (100_000,), generator=generator)])
    assert (log2(totals.to(torch.float64) * 2.0**-40) >= 0.0).all()


def test_a_total_of_one_unit_more_is_seen():
    found = log2(torch.tensor([2.0**40 + 1.0], dtype=torch.float64) * 2.0**-40).item()
    assert abs(found - math.log1p(2.0**-40) * LOG2_E) <= 2.0**-90


def test_constants_are_the_nearest_numbers():
    with mpmath.workprec(200):
        assert float(mpmath.log(2)) == LN2
        assert float(1 / mpmath.log(2)) == LOG2_E
    assert Fraction(LOG2_E) != Fraction(float(np.float32(LOG2_E)))


def test_nothing_gives_a_number():
    assert log2(torch.zeros(1, dtype=torch.float64)).isfinite().all()


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


def test_the_root_of_0_is_0():
    assert square_root(torch.zeros(3, dtype=torch.float64)).tolist() == [0.0] * 3
