"""Draws are asked for in calls that end by the clock, and depend on nothing else."""

import math

import pytest
import torch

from compiled_sampler.conformance import QUICK, Bench, bench
from tests.compiled_sampler.conformance.adapters.race_adapter import Race

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


def test_a_fast_machine_draws_most_of_it_in_the_largest_calls(monkeypatch):
    found, _ = sizes(monkeypatch, 64 * MOST, 1.0, 1e9)
    assert (sum(found), found.count(MOST)) == (64 * MOST, 63)


def test_the_clock_begins_behind_the_first_call_which_may_compile(monkeypatch):
    assert sizes(monkeypatch, 64 * MOST, 1.0, 1e5, first_s=50.0)[0] == sizes(monkeypatch, 64 * MOST, 1.0, 1e5)[0]


@pytest.mark.parametrize("rate", [1e3, 1e4, 3e4, 1e5, 1e6])
def test_a_slow_machine_overruns_by_the_smallest_call_and_uses_its_time(monkeypatch, rate):
    found, took = sizes(monkeypatch, 2**30, 1.0, rate)
    smallest = MOST // 4 / rate
    assert 1.0 <= took - found[0] / rate <= 1.0 + smallest


def test_single_calls_stay_single_and_no_time_is_one_call(monkeypatch):
    assert sizes(monkeypatch, 5, 10.0, 1.0, most=1)[0] == [1] * 5
    assert sizes(monkeypatch, 5 * MOST, 0.0, 1e4)[0] == [MOST // 4]
