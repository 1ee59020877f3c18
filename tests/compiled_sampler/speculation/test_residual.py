"""The arithmetic of the last token: logarithms of weights, and what the target has left of the draft's law."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_sampler.core.arithmetic import log2_float32
from compiled_sampler.passes.law import Law
from compiled_sampler.speculation.residual import residual_weight

MAX_ERROR = 2e-7 + 2.0**-24
"""Of the polynomial, and of the two roundings to float32 of its last steps, ``2**-25`` each."""


def law(weights: list[int]) -> Law:
    total = sum(weights)
    inverse = torch.tensor([1.0 / total if total else 0.0], dtype=torch.float64)
    return Law(None, torch.tensor([total]), inverse, torch.tensor([0], dtype=torch.int32))


def test_the_logarithm_is_exact_at_powers_of_two():
    exponents = torch.arange(-126, 128)
    assert log2_float32(torch.ldexp(torch.ones(len(exponents)), exponents)).tolist() == exponents.tolist()


def test_the_logarithm_is_within_its_error_on_one_octave():
    x = 1.0 + torch.arange(2**23) / 2**23
    assert (log2_float32(x).double() - torch.log2(x.double())).abs().max() <= MAX_ERROR


@pytest.mark.parametrize("exponent", [-120, -60, -50, -20, -3, -1, 1, 7])
def test_the_logarithm_is_within_its_error_and_one_rounding_elsewhere(exponent):
    x = torch.ldexp(1.0 + torch.rand(2**14), torch.tensor(exponent))
    true = torch.log2(x.double())
    rounding = 2.0**-24 * 2.0 ** torch.ceil(torch.log2(true.abs().clamp(min=1.0)))
    assert ((log2_float32(x).double() - true).abs() - rounding).max() <= MAX_ERROR


WEIGHTS = st.lists(st.integers(0, 2**40), min_size=4, max_size=4).filter(any)


@given(WEIGHTS, WEIGHTS, st.floats(2.0**-30, 1.0))
def test_what_is_left_is_the_difference_of_the_laws(target, draft, carry):
    w, m = torch.tensor([target]), torch.tensor([draft])
    share = torch.tensor([carry], dtype=torch.float64)
    for dtype, bits in ((torch.float64, 50), (torch.float32, 21)):  # an int64 is rounded to float32 here, a weight not
        left = residual_weight(w, law(target), share, m, law(draft), dtype)
        for i in range(4):
            wanted = Fraction(carry) * Fraction(target[i], sum(target)) - Fraction(draft[i], sum(draft))
            assert abs(Fraction(float(left[0, i])) - wanted) <= 2.0**-bits


@given(WEIGHTS)
def test_nothing_is_left_where_the_laws_are_the_same(weights):
    w = torch.tensor([weights])
    assert not residual_weight(w, law(weights), None, w, law(weights)).any()
