"""The powers that are listed are those of runs that no clock ends, or a little weaker where rows are random."""

import re

import torch

from compiled_sampler.conformance import FULL, QUICK, Bench, Effort, Outcome, ask, chosen
from compiled_sampler.conformance.questions import QUESTIONS
from tests.compiled_sampler.conformance.adapters.race_adapter import Race

SMALL = Effort(2**10, 2**10, 2**11, 2**9, 1, 100, 1000.0, 1000.0, 1000)
"""Few draws, which no clock ends."""

RANDOM = {"law.top_p", "law.min_p", "law.mixed_filters", "law.top_p_base", "randomness.serial_top_p"}
RANDOM |= {"robustness.nan", "robustness.infinity", "verification.counters"}
"""Questions of rows of which fewer tokens may be kept than the most, and one of two rules instead of three."""

LEFT_OUT = ("law.tail*", "determinism.paths", "determinism.new_process", "determinism.replay", "verification.paths")
"""Questions that take long, or that the sampler is not asked."""


def number(power):
    return float(re.search(r"\d+(\.\d+)?", power).group())


def test_every_question_has_a_power():
    for effort in (QUICK, FULL):
        assert all(each.power(effort) for each in QUESTIONS)


def test_powers_are_those_of_a_run():
    bench = Bench(Race, None, torch.device("cpu"), SMALL)
    left_out = {each.name for each in chosen(LEFT_OUT)}
    listed_powers = {each.name: each.power(SMALL) for each in QUESTIONS}
    asked = [each for each in QUESTIONS if each.name not in left_out]
    results = [result for result in (ask(bench, each) for each in asked) if result.outcome is not Outcome.NOT_ASKED]
    assert len(results) > 45
    for each in results:
        listed = listed_powers[each.question]
        if each.question in RANDOM:
            assert 0.5 < number(each.power) / number(listed) <= 1.0, each
        else:
            assert each.power == listed, each


def test_a_full_run_finds_less_than_a_quick_one_where_it_depends_on_the_effort():
    (question,) = chosen(["law.no_filter"])
    assert "1.51%" in question.power(QUICK)
    assert "0.38%" in question.power(FULL)
