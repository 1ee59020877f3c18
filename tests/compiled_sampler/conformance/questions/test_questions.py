"""Every fault is found by the question that is meant for it, and a sampler that is right passes all questions."""

import functools
from unittest import mock

import pytest
import torch

from compiled_sampler.conformance import QUICK, Bench, Effort, Outcome, Semantics, ask, chosen, ours, peers
from compiled_sampler.conformance.evidence import FALSE_ALARM
from compiled_sampler.conformance.ours import Graph
from compiled_sampler.conformance.questions import cost, law
from compiled_sampler.conformance.suite import QUESTIONS
from tests.compiled_sampler.conformance.adapters import broken_adapters
from tests.compiled_sampler.conformance.adapters.broken_adapters import (
    ALSO_FOUND,
    COSTLY,
    FOUND_BY,
    Allocates,
    Replays,
    Waits,
)
from tests.compiled_sampler.conformance.adapters.race_adapter import Race

SMALL = Effort(2**15, 2**15, 2**13, 2**12, 1, 100, 5.0, 60.0, 1000, broken_adapters.LIMIT)
"""Finds what is plainly wrong; the draws, and not the clock, end each question."""

BRIEF = Effort(2**13, 2**13, 2**11, 2**9, 1, 100, 1.0, 1.0)
"""Enough to ask every question."""

ENOUGH = {"law.no_filter": Effort(2**18, 2**16, 2**13, 2**12, 1, 100, 5.0, 60.0)}
"""A bias of 1 % needs more."""

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


@pytest.mark.parametrize(("name", "target"), [*FOUND_BY.items(), *ALSO_FOUND])
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


def test_a_sampler_that_declares_no_order_of_greedy_ties_may_take_any():
    bench = bench_of(broken_adapters.TakesAnyOfTies)
    for question in chosen(["robustness.infinity", "law.greedy_ties"]):
        result = ask(bench, question)
        assert result.outcome is Outcome.PASSED, result


@pytest.mark.parametrize("target", [broken_adapters.Undeclared, broken_adapters.DeclaresDict])
def test_what_is_declared_wrongly_is_named(target):
    result = ask(bench_of(target), *chosen(["law.greedy"]))
    assert result.outcome is Outcome.FAILED
    got = "nothing" if target is broken_adapters.Undeclared else "dict"
    assert f"must declare `semantics = Semantics(...)`, got {got}" in result.detail


@pytest.mark.parametrize(("target", "wanted"), [(Race, True), (broken_adapters.TruncatedTail, False)])
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


class Simulated:
    """A device that counts the clones and reads of tensors, and is busy until one is read."""

    def __init__(self):
        self.allocated, self.is_busy = 0, False

    def settle(self):
        self.is_busy = False

    def allocations(self):
        return self.allocated

    def keep_busy(self):
        self.is_busy = True
        return lambda: self.is_busy


@pytest.fixture
def device(monkeypatch):
    """The simulated device, instead of the one that is measured."""
    made = Simulated()
    monkeypatch.setattr(cost, "Device", lambda bench: made)
    allocates, waits = Allocates.replayed, Waits.replayed

    def counted(self, tokens):
        made.allocated += 1
        return allocates(self, tokens)

    def waited(self, tokens):
        made.is_busy = False
        return waits(self, tokens)

    with mock.patch.object(Allocates, "replayed", counted), mock.patch.object(Waits, "replayed", waited):
        yield made


def asked(target, name, where):
    (question,) = chosen([name])
    return ask(Bench(target, None, torch.device(where), QUICK), question)


@pytest.mark.parametrize("name", COSTLY)
def test_a_simulated_cost_is_found_by_its_question_alone(device, name):
    assert asked(Replays, name, "cpu").outcome is Outcome.PASSED
    found = {each for each in COSTLY if asked(COSTLY[name], each, "cpu").outcome is Outcome.FAILED}
    assert found == {name}


def test_without_cuda_costs_are_not_asked():
    results = [asked(Replays, name, "cpu") for name in COSTLY]
    assert {(each.outcome, each.detail) for each in results} == {(Outcome.NOT_ASKED, "only on CUDA")}


@pytest.mark.gpu
@pytest.mark.parametrize("name", COSTLY)
def test_a_cost_is_found_on_a_device(name):
    assert asked(Replays, name, "cuda").outcome is Outcome.PASSED
    result = asked(COSTLY[name], name, "cuda")
    assert result.outcome is Outcome.FAILED, result


@pytest.mark.gpu
@pytest.mark.parametrize("name", COSTLY)
def test_a_replay_of_ours_costs_nothing_but_a_launch(name):
    result = asked(Graph, name, "cuda")
    assert result.outcome is Outcome.PASSED, result


FEW_DRAWS = Effort(2**11, 2**11, 2**9, 2**7, 1, 100, 1.0, 1.0, 200)
SECTIONS = ("law.no_filter", "determinism", "randomness", "verification", "robustness.padded_vocab")


class Strict(Race):
    """Raises where a seed or a position is not declared."""

    def sample(self, logits, params, seeds, positions):
        self.check(seeds, positions)
        return super().sample(logits, params, seeds, positions)

    def verify(self, drafted, rule):
        self.check(drafted.seeds, drafted.positions + torch.tensor(drafted.num_drafts))
        return super().verify(drafted, rule)

    def check(self, seeds, positions):
        first, last = self.taken
        if any(seed is not None and not first <= seed <= last for seed in seeds) or (positions > self.farthest).any():
            raise ValueError("no such seed or position")

    def paths(self):
        return {"itself": type(self)}


class Unsigned(Strict):
    """As an engine whose seeds are those of int64 that are not negative."""

    taken, farthest = (0, 2**63 - 1), 2**63 - 1
    semantics = Semantics(padded_vocab=True, rules=("match", "rejection"), seed_range=taken)


class Short(Strict):
    """As an engine of 31-bit seeds and positions."""

    taken, farthest = (0, 2**31 - 1), 2**31 - 1
    semantics = Semantics(padded_vocab=True, rules=("match", "rejection"), seed_range=taken, largest_position=farthest)


class Undeclared(Unsigned):
    """Declares every seed."""

    semantics = Semantics(padded_vocab=True, rules=("match", "rejection"))


OUT_OF_RANGE = {
    Unsigned: {"randomness.seed_2**63", "randomness.seed_negative"},
    Short: {"randomness.seed_2**32", "randomness.seed_2**63", "randomness.seed_negative", "randomness.position_2**32"},
}


@functools.cache
def results(target):
    bench = Bench(target, None, torch.device("cpu"), FEW_DRAWS)
    return {each.name: ask(bench, each) for each in chosen(SECTIONS)}


@pytest.mark.parametrize("target", OUT_OF_RANGE)
def test_no_question_leaves_the_declared_ranges(target):
    failed = [each for each in results(target).values() if each.outcome is Outcome.FAILED]
    assert failed == []


@pytest.mark.parametrize("target", OUT_OF_RANGE)
def test_what_needs_more_is_not_asked_and_says_why(target):
    refused = {n: r for n, r in results(target).items() if "seed_range" in r.detail or "largest_position" in r.detail}
    assert set(refused) == OUT_OF_RANGE[target]
    assert {each.outcome for each in refused.values()} == {Outcome.NOT_ASKED}
    wanted = f"declared: seed_range={target.taken}"
    assert refused["randomness.seed_negative"].detail == wanted


def test_a_range_that_is_not_kept_is_a_failure():
    outcomes = {name: each.outcome for name, each in results(Undeclared).items()}
    assert outcomes["randomness.seed_negative"] is outcomes["determinism.paths"] is Outcome.FAILED


@pytest.mark.parametrize(
    "ranges", [{"seed_range": (1, 2**63)}, {"seed_range": (0, 2**16)}, {"largest_position": 2048}], ids=str
)
def test_ranges_too_small_for_any_question_are_refused(ranges):
    with pytest.raises(ValueError, match=r"2\*\*31 - 1"):
        Semantics(**ranges)
