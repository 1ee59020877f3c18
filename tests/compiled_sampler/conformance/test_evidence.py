"""How many draws a run asks for, by the clock, and what they say: bounds hold and powers are kept, by simulation."""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from scipy.stats import binom

from compiled_sampler.conformance import FULL, QUICK, Bench, Effort, Outcome, Params, Semantics, ask, bench, chosen
from compiled_sampler.conformance.evidence import (
    binomial_p_value,
    binomial_power,
    law,
    multinomial_p_value,
    multinomial_power,
    rare_power,
)
from compiled_sampler.conformance.suite import QUESTIONS
from tests.compiled_sampler.conformance.adapters.race_adapter import Race
from tests.oracles import oracle

RUNS, N, ALARM = 4000, 5000, 1e-2


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
        found = law(x, params, dataclasses.replace(Semantics(), top_p_base=base))
        settings = (params.temperature, params.top_k, params.top_p, params.min_p)
        keep = oracle.reference_keep(x.tolist(), *settings, {"kept": "top_k", "row": "all"}[base])
        weights = oracle.masses(x.tolist(), params.temperature or 1.0)
        assert found == pytest.approx([float(each) for each in oracle.exact_law(weights, keep)], abs=1e-12)


ORDERS = ("top_p", "min_p"), ("min_p", "top_p")


@pytest.mark.parametrize(
    ("probs", "params", "field", "choices", "counts"),
    [
        ([0.4, 0.2, 0.2, 0.2], Params(top_k=2), "top_k_ties", ("lowest_id", "all"), [2, 4]),
        ([0.25] * 4, Params(top_p=0.5), "keeps_at_boundary", (False, True), [2, 3]),
        ([0.4, 0.3, 0.2, 0.1], Params(top_p=0.5, min_p=0.7), "filters", ORDERS, [2, 1]),
    ],
)
def test_declared_choices_change_the_law(probs, params, field, choices, counts):
    laws = [law(np.log(probs), params, dataclasses.replace(Semantics(), **{field: choice})) for choice in choices]
    assert [(each > 0).sum() for each in laws] == counts


MOST = 2**14


def sizes(monkeypatch, total, seconds, rate, first_s=0.0, most=MOST):
    """The sizes of calls on a machine that draws ``rate`` rows a second and compiles first, and what they take."""
    now = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    found = []
    for size in Bench(Race, None, torch.device("cpu"), QUICK).portions(total, most, seconds):
        now[0] += size / rate + (0.0 if found else first_s)
        found.append(size)
    return found, now[0]


@pytest.mark.parametrize("total", [1, 100, MOST // 4, MOST, 3 * MOST + 7])
def test_without_a_clock_they_add_up(monkeypatch, total):
    for rate in (1e2, 1e12):
        found, _ = sizes(monkeypatch, total, math.inf, rate)
        assert sum(found) == total
        assert 1 <= min(found) <= max(found) <= MOST


def test_a_fast_machine_draws_most_of_it_in_the_largest_calls_and_single_calls_stay_single(monkeypatch):
    found, _ = sizes(monkeypatch, 64 * MOST, 1.0, 1e9)
    assert (sum(found), found.count(MOST)) == (64 * MOST, 63)
    assert sizes(monkeypatch, 5, 10.0, 1.0, most=1)[0] == [1] * 5
    assert sizes(monkeypatch, 5 * MOST, 0.0, 1e4)[0] == [MOST // 4]  # no time is one call


def test_the_clock_begins_behind_the_first_call_which_may_compile(monkeypatch):
    assert sizes(monkeypatch, 64 * MOST, 1.0, 1e5, first_s=50.0)[0] == sizes(monkeypatch, 64 * MOST, 1.0, 1e5)[0]


@pytest.mark.parametrize("rate", [1e3, 1e4, 3e4, 1e5, 1e6])
def test_a_slow_machine_overruns_by_the_smallest_call_and_uses_its_time(monkeypatch, rate):
    found, took = sizes(monkeypatch, 2**30, 1.0, rate)
    smallest = MOST // 4 / rate
    assert 1.0 <= took - found[0] / rate <= 1.0 + smallest


SMALL = Effort(2**10, 2**10, 2**11, 2**9, 1, 100, 1000.0, 1000.0, 1000)
"""Few draws, which no clock ends."""

RANDOM = {"law.top_p", "law.min_p", "law.mixed_filters", "law.top_p_base", "randomness.serial_top_p"}
RANDOM |= {"robustness.nan", "robustness.infinity", "verification.counters"}
"""Questions of rows of which fewer tokens may be kept than the most, and one of two rules instead of three."""

LEFT_OUT = ("law.tail*", "determinism.paths", "determinism.new_process", "determinism.replay", "verification.paths")
"""Questions that take long, or that the sampler is not asked."""


def test_every_question_has_a_power():
    for effort in (QUICK, FULL):
        assert all(each.power(effort) for each in QUESTIONS)


def test_powers_are_those_of_a_run():
    def number(power):
        return float(re.search(r"\d+(\.\d+)?", power).group())

    bench, left_out = Bench(Race, None, torch.device("cpu"), SMALL), chosen(LEFT_OUT)
    results = [ask(bench, each) for each in QUESTIONS if each not in left_out]
    listed = {each.name: each.power(SMALL) for each in QUESTIONS}
    asked = [each for each in results if each.outcome is not Outcome.NOT_ASKED]
    assert len(asked) > 45
    for each in asked:
        if each.question in RANDOM:
            assert 0.5 < number(each.power) / number(listed[each.question]) <= 1.0, each
        else:
            assert each.power == listed[each.question], each
