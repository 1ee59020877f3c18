"""Every fault is found by the question that is meant for it, and a sampler that is right passes all questions."""

import functools

import pytest
import torch

from compiled_sampler.conformance import Bench, Effort, Outcome, ask, chosen, ours, peers
from compiled_sampler.conformance.evidence import FALSE_ALARM
from compiled_sampler.conformance.questions import QUESTIONS, law
from tests.compiled_sampler.conformance.adapters import broken_adapters, broken_paths
from tests.compiled_sampler.conformance.adapters.broken_paths import COSTLY
from tests.compiled_sampler.conformance.adapters.race_adapter import Race

SMALL = Effort(2**15, 2**15, 2**13, 2**12, 1, 100, 5.0, 60.0, 1000, broken_paths.LIMIT)
"""Finds what is plainly wrong; the draws, and not the clock, end each question."""

BRIEF = Effort(2**13, 2**13, 2**11, 2**9, 1, 100, 1.0, 1.0)
"""Enough to ask every question."""

ENOUGH = {"law.no_filter": Effort(2**18, 2**16, 2**13, 2**12, 1, 100, 5.0, 60.0)}
"""A bias of 1 % needs more."""

FOUND_BY = broken_adapters.FOUND_BY | broken_paths.FOUND_BY
TruncatedTail = broken_adapters.TruncatedTail

HERE = "tests.compiled_sampler.conformance"
SUITE = [each for each in QUESTIONS if not each.name.startswith("law.tail")]


def bench_of(target, question="", name=None):
    return Bench(target, name, torch.device("cpu"), ENOUGH.get(question, SMALL))


@pytest.fixture(scope="module")
def right_results():
    bench = bench_of(Race, name=f"{HERE}.adapters.race_adapter:Race")
    return {each.name: ask(bench, each) for each in SUITE}


@pytest.mark.parametrize("name", [each.name for each in SUITE])
def test_a_sampler_that_is_right_passes(right_results, name):
    absent = {"determinism.paths", "determinism.replay", "verification.paths", *COSTLY}
    wanted = Outcome.NOT_ASKED if name in absent else Outcome.PASSED
    assert right_results[name].outcome is wanted, right_results[name]


def test_a_run_keeps_its_bound_on_false_alarms(right_results):
    assert 0.0 < 2.0 * sum(each.false_alarm for each in right_results.values()) < FALSE_ALARM


@pytest.mark.parametrize(("name", "target"), [*FOUND_BY.items(), *broken_adapters.ALSO_FOUND])
def test_a_fault_is_found_by_its_question(name, target):
    bench = bench_of(target, name, f"{target.__module__}:{target.__name__}")
    (question,) = chosen([name])
    result = ask(bench, question)
    assert result.outcome is Outcome.FAILED, result
    assert name in result.repeat


@pytest.mark.parametrize(
    ("target", "failed"), [(broken_adapters.InPlace, {"robustness.inputs"}), (broken_adapters.Consumes, set())]
)
def test_a_right_sampler_that_writes_its_logits_fails_one_question_unless_it_declares_so(target, failed):
    bench = Bench(target, None, torch.device("cpu"), BRIEF)
    names = ("robustness", "verification.counters", "verification.stream", "law.probs", "law.logprobs", "determinism.*")
    results = [ask(bench, each) for each in chosen(names)]
    assert {each.question for each in results if each.outcome is Outcome.FAILED} == failed


@pytest.mark.parametrize("target", [broken_adapters.Undeclared, broken_adapters.DeclaresDict])
def test_what_is_declared_wrongly_is_named(target):
    result = ask(bench_of(target), *chosen(["law.greedy"]))
    assert result.outcome is Outcome.FAILED
    got = "nothing" if target is broken_adapters.Undeclared else "dict"
    assert f"must declare `semantics = Semantics(...)`, got {got}" in result.detail


@pytest.mark.parametrize(("target", "wanted"), [(Race, True), (TruncatedTail, False)])
def test_a_tail_that_is_cut_off_is_found(target, wanted):
    assert law.tail(bench_of(target), 1e-4).is_kept == wanted


@pytest.mark.parametrize("section", ["law", "determinism", "randomness", "robustness"])
def test_plain_torch_keeps_what_it_declares(section):
    bench = Bench(peers.PlainTorch, None, torch.device("cpu"), BRIEF)
    questions = [each for each in chosen([section]) if "tail" not in each.name]
    failed = [each for each in map(functools.partial(ask, bench), questions) if each.outcome is Outcome.FAILED]
    assert failed == []


QUICK_OF_OURS = (
    "law.mixed_filters",
    "law.top_k_ties",
    "law.top_p_b*",
    "determinism.batchmates",
    "determinism.order",
    "randomness.swapped",
    "verification.own_drafts",
    "verification.counters",
    "robustness",
)


def test_ours_passes():
    bench = Bench(ours.Eager, "ours-eager", torch.device("cpu"), BRIEF)
    failed = [each for each in (ask(bench, q) for q in chosen(QUICK_OF_OURS)) if each.outcome is Outcome.FAILED]
    assert failed == []


def test_every_question_has_a_control_or_shares_the_test_of_one_that_has():
    same_test = {f"law.{name}" for name in law.PARAMS} | {f"law.tail_1e-{n}" for n in (7, 8)}
    same_test |= {"law.16_bits", "law.flat_row", "law.one_token", "law.kept_set"}
    same_test |= {"robustness.infinity", "robustness.largest_floats"}
    assert {each.name for each in QUESTIONS} - set(FOUND_BY) - set(COSTLY) <= same_test
