"""Integer masses: exact where 2**t is, within the stated bounds elsewhere, and summable in any order."""

import math

import numpy as np
import pytest
import torch

from compiled_sampler.core.mass import MASS_BITS, exp2_mass, exp2_units, scaled_logits
from compiled_sampler.modes import MAX_VOCAB_SIZE

V = 151_936
UNIT = 2.0**MASS_BITS
MAX_TOTAL_VARIATION = 2e-6


def row_of(shape, generator):
    ranks = torch.arange(1, V + 1, dtype=torch.float64)
    rows = {
        "peaked": -1.2 * ranks.log() * 2.0,
        "zipf": -1.07 * ranks.log(),
        "normal": 3.0 * torch.randn(V, generator=generator, dtype=torch.float64),
        "flat": torch.zeros(V, dtype=torch.float64),
        "nearly_flat": 1e-3 * torch.randn(V, generator=generator, dtype=torch.float64),
        "two_levels": torch.where(ranks <= 100, 0.0, -9.0),
        "offset": 500.0 + 3.0 * torch.randn(V, generator=generator, dtype=torch.float64),
    }
    return rows[shape].to(torch.float32)


def masses(row, temperature):
    scale = torch.tensor([math.log2(math.e) / temperature], dtype=torch.float32)
    return exp2_mass(scaled_logits(row, row.max(), scale))


@pytest.mark.parametrize("temperature", [0.05, 0.3, 0.8, 1.0, 2.0, 10.0])
@pytest.mark.parametrize("shape", ["peaked", "zipf", "normal", "flat", "nearly_flat", "two_levels", "offset"])
def test_law_is_close_to_the_softmax(shape, temperature, generator):
    row = row_of(shape, generator)
    mass = masses(row, temperature)
    law = mass.numpy() / float(int(mass.sum()))
    x = row.numpy().astype(np.float64)
    softmax = np.exp((x - x.max()) / temperature)
    softmax /= softmax.sum()
    assert 0.5 * np.abs(law - softmax).sum() <= MAX_TOTAL_VARIATION


def test_powers_of_two_are_exact_what_is_below_a_unit_is_0_and_nothing_exceeds_the_likeliest():
    assert exp2_mass(-torch.arange(0.0, 41.0)).tolist() == [2 ** (MASS_BITS - k) for k in range(41)]
    assert not exp2_mass(torch.tensor([-40.001, -41.0, -63.9, -64.0, -1e9, -torch.inf, torch.nan])).any()
    assert (exp2_mass(torch.tensor([0.0, -0.0, 1e-45, 1.0, 1e30, torch.inf])) == 2**MASS_BITS).all()


def test_units_are_the_masses():
    near = torch.tensor([0.0, -0.0, -64.0, -63.99999, -41.0, -40.00001, 1.0, torch.inf, -torch.inf, torch.nan])
    t = torch.cat([near, -70.0 * torch.rand(2**18), -torch.rand(2**16), -torch.arange(0.0, 70.0, 2.0**-9)])
    assert exp2_units(t).dtype == torch.float32
    assert exp2_units(t).to(torch.int64).equal(exp2_mass(t))
    assert exp2_mass(t).to(torch.float32).equal(exp2_units(t))


def test_masses_are_within_4e_7_of_the_power_of_two():
    """So that none rises by more than twice that as logits fall."""
    t = torch.cat((torch.linspace(-30.0, 0.0, 600_001), -torch.rand(400_000) * 2.0**-10))
    wanted = np.exp2(t.numpy().astype(np.float64)) * UNIT
    assert (np.abs(exp2_mass(t).numpy() - wanted) <= 4e-7 * wanted + 1.0).all()


def test_the_largest_row_fits_into_an_int64():
    assert MAX_VOCAB_SIZE * 2**MASS_BITS < 2**63


def test_scaled_logits_are_single_rounded_operations():
    x, scale = torch.tensor([1.1, -2.7, 3.3]), torch.tensor([1.7])
    wanted = (x.numpy() - np.float32(3.3)) * np.float32(1.7)
    assert scaled_logits(x, torch.tensor([3.3]), scale).tolist() == wanted.tolist()


@pytest.mark.parametrize("top", [math.inf, -math.inf])
def test_an_infinite_maximum_makes_no_nan(top):
    t = scaled_logits(torch.tensor([top, -math.inf, 0.0]), torch.tensor([top]), torch.tensor([1.0]))
    assert not t.isnan().any()
    assert t[0] == top
