"""Square roots are near those of libm, and that of 0 is 0."""

import math
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_sampler.core.arithmetic.square_root import square_root


@given(st.floats(1.0, 4.0, exclude_max=True), st.integers(-500, 500))
def test_roots_are_within_two_to_the_minus_50(mantissa, exponent):
    x = math.ldexp(mantissa, 2 * exponent)
    y = Fraction(float(square_root(torch.tensor([x], dtype=torch.float64))))
    assert abs(y * y / Fraction(x) - 1) <= Fraction(2, 2**50)


def test_the_root_of_0_is_0():
    assert square_root(torch.zeros(3, dtype=torch.float64)).tolist() == [0.0] * 3
