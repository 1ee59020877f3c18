"""The bounds hold, and the powers that are stated are kept, by simulation; the oracle agrees with that of the tests."""

import dataclasses

import numpy as np
import pytest
from scipy.stats import binom

from compiled_sampler.conformance import Params, Semantics
from compiled_sampler.conformance.evidence import (
    binomial_p_value,
    binomial_power,
    law,
    multinomial_p_value,
    multinomial_power,
    rare_power,
)
from tests.oracles import oracle

RUNS, N, ALARM = 4000, 5000, 1e-2
SEMANTICS = Semantics()


@pytest.mark.parametrize("cells", [2, 5, 32])
def test_a_law_is_rarely_accused_and_the_stated_bias_is_found(cells):
    rng = np.random.default_rng(cells)
    right = np.full(cells, 1.0 / cells)
    alarms = sum(multinomial_p_value(counts, right) < ALARM for counts in rng.multinomial(N, right, RUNS))
    assert alarms <= RUNS * ALARM
    wrong, moved = right.copy(), multinomial_power(N, cells, ALARM)
    wrong[: cells // 2] *= 1.0 + moved / (cells // 2 / cells)
    wrong[cells // 2 :] *= 1.0 - moved / (1.0 - cells // 2 / cells)
    found = sum(multinomial_p_value(counts, right) < ALARM for counts in rng.multinomial(N, wrong, RUNS))
    assert found >= 0.985 * RUNS


@pytest.mark.parametrize("p", [0.5, 0.01])
def test_the_stated_factors_of_a_probability_are_found(p):
    accused = [count for count in range(N + 1) if binomial_p_value(count, N, p) < ALARM]
    assert 0.5 * ALARM < binom.pmf(accused, N, p).sum() <= ALARM
    for factor in binomial_power(N, p, ALARM):
        assert binom.pmf(accused, N, factor * p).sum() == pytest.approx(0.99)


def test_the_edges_of_the_bounds():
    assert multinomial_p_value([0, 1], [1.0, 0.0]) == 0.0
    assert multinomial_p_value([5, 0], [1.0, 0.0]) == 1.0
    assert binomial_p_value(3, 10, 0.0) == 0.0
    assert binomial_power(10, 1e-3)[0] == -1.0
    assert rare_power(460) == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("base", ["kept", "row"])
@pytest.mark.parametrize(
    "params",
    [
        Params(),
        Params(temperature=0.0),
        Params(temperature=0.6, top_k=4),
        Params(top_p=0.77),
        Params(min_p=0.123),
        Params(1.3, 9, 0.81, 0.07),
    ],
)
def test_two_oracles_agree(params, base):
    rng = np.random.default_rng(0)
    for _ in range(30):
        x = rng.standard_normal(20).round(1)
        x[rng.integers(0, 20)] = rng.choice([np.nan, np.inf, -np.inf, 3.0])
        found = law(x, params, dataclasses.replace(SEMANTICS, top_p_base=base))
        settings = (params.temperature, params.top_k, params.top_p, params.min_p)
        keep = oracle.reference_keep(x.tolist(), *settings, {"kept": "top_k", "row": "all"}[base])
        weights = oracle.masses(x.tolist(), params.temperature or 1.0)
        assert found == pytest.approx([float(each) for each in oracle.exact_law(weights, keep)], abs=1e-12)


def test_declared_choices_change_the_law():
    tied = np.array([1.0, 0.0, 0.0, 0.0])
    kept = [
        (law(tied, Params(top_k=2), dataclasses.replace(SEMANTICS, top_k_ties=ties)) > 0).sum()
        for ties in ("lowest_id", "all")
    ]
    assert kept == [2, 4]
    equal = [
        (law(np.zeros(4), Params(top_p=0.5), dataclasses.replace(SEMANTICS, keeps_at_boundary=at)) > 0).sum()
        for at in (False, True)
    ]
    assert equal == [2, 3]
    x = np.log([0.4, 0.3, 0.2, 0.1])
    params = Params(top_p=0.5, min_p=0.7)
    orders = [("top_p", "min_p"), ("min_p", "top_p")]
    counts = [(law(x, params, dataclasses.replace(SEMANTICS, filters=order)) > 0).sum() for order in orders]
    assert counts == [2, 1]
