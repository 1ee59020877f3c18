"""Every fault is found by the question that is meant for it, and a sampler that is right passes all questions."""

import functools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_sampler.conformance import QUICK, Bench, Effort, Outcome, Semantics, ask, chosen, ours, peers
from compiled_sampler.conformance.bench import NotAsked
from compiled_sampler.conformance.evidence import FALSE_ALARM
from compiled_sampler.conformance.ours import Graph
from compiled_sampler.conformance.question import Count, judged
from compiled_sampler.conformance.questions import cost, law
from compiled_sampler.conformance.suite import QUESTIONS
from tests.compiled_sampler.conformance.adapters import broken_adapters
from tests.compiled_sampler.conformance.adapters.broken_adapters import COSTLY, FAULTS, Replays
from tests.compiled_sampler.conformance.adapters.race_adapter import Race

SMALL = Effort(2**15, 2**15, 2**13, 2**12, 1, 100, 60.0, 60.0, 1000, broken_adapters.LIMIT)
"""Finds what is plainly wrong; the draws, and not the clock, end each question."""

BRIEF = Effort(2**13, 2**13, 2**11, 2**9, 1, 100, 1.0, 1.0)
"""Enough to ask every question."""

ENOUGH = {"law.no_filter": Effort(2**18, 2**16, 2**13, 2**12, 1, 100, 60.0, 60.0)}
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


@pytest.mark.parametrize(("name", "target"), [(name, fault) for fault, names in FAULTS.items() for name in names])
def test_a_fault_is_found_by_its_question(name, target):
    bench = bench_of(target, name, f"{target.__module__}:{target.__name__}")
    (question,) = chosen([name])
    result = ask(bench, question)
    assert result.outcome is Outcome.FAILED, result
    assert name in result.repeat


ASKED = ("robustness", "verification.counters", "verification.stream", "law.probs", "law.logprobs", "determinism.*")


@pytest.mark.parametrize(
    ("target", "names", "failed"),
    [
        (broken_adapters.InPlace, ASKED, {"robustness.inputs"}),
        (broken_adapters.Consumes, ASKED, set()),
        (broken_adapters.TakesAnyOfTies, ["robustness.infinity"], set()),
    ],
)
def test_a_right_sampler_with_a_choice_of_its_own_fails_one_question_unless_it_declares_it(target, names, failed):
    bench = Bench(target, None, torch.device("cpu"), BRIEF)
    results = [ask(bench, each) for each in chosen(names)]
    assert {each.question for each in results if each.outcome is Outcome.FAILED} == failed


def test_a_sampler_that_declares_no_order_of_greedy_ties_may_take_any():
    bench = bench_of(broken_adapters.TakesAnyOfTies)
    for question in chosen(["robustness.infinity", "law.greedy_ties"]):
        result = ask(bench, question)
        assert result.outcome is Outcome.PASSED, result


def test_tokens_out_of_range_are_wrong_rows_of_greedy_ties():
    target = broken_adapters.other("Outside", sample=lambda self, logits, *_: torch.full((len(logits),), -1))
    result = ask(bench_of(target), *chosen(["law.greedy_ties"]))
    assert result.outcome is Outcome.FAILED
    assert "rows are wrong" in result.detail


def test_a_mismatch_outweighs_what_is_not_asked_after_it():
    def counts(mismatches):
        yield Count("way", 10, mismatches)
        raise NotAsked("too narrow")

    assert not judged(counts(1), "rows").is_kept
    with pytest.raises(NotAsked):
        judged(counts(0), "rows")


@pytest.mark.parametrize(
    ("target", "got"), [(broken_adapters.Undeclared, "nothing"), (broken_adapters.DeclaresDict, "dict")]
)
def test_what_is_declared_wrongly_is_named(target, got):
    result = ask(bench_of(target), *chosen(["law.greedy"]))
    assert result.outcome is Outcome.FAILED
    assert f"must declare `semantics = Semantics(...)`, got {got}" in result.detail


@pytest.mark.parametrize(("target", "wanted"), [(Race, True), (broken_adapters.TruncatedTail, False)])
def test_a_tail_that_is_cut_off_is_found(target, wanted):
    assert law.tail(bench_of(target), 1e-4).is_kept == wanted


QUICK_OF_OURS = ("law.mixed_filters", "law.top_k_ties", "law.top_p_b*", "determinism.batchmates", "determinism.order")
QUICK_OF_OURS += ("randomness.swapped", "verification.own_drafts", "verification.counters", "robustness")


@pytest.mark.parametrize(
    ("target", "names"),
    [(peers.PlainTorch, [section]) for section in ("law", "determinism", "randomness", "robustness")]
    + [(ours.Eager, QUICK_OF_OURS)],
)
def test_shipped_samplers_keep_what_they_declare(target, names):
    bench = Bench(target, None, torch.device("cpu"), BRIEF)
    results = [ask(bench, each) for each in chosen(names) if "tail" not in each.name]
    assert [each for each in results if each.outcome is Outcome.FAILED] == []


def test_every_question_has_a_control_or_shares_the_test_of_one_that_has():
    covered = {*COSTLY}.union(*FAULTS.values())
    covered |= {f"law.{name}" for name in law.PARAMS} | {f"law.tail_1e-{n}" for n in (7, 8)}
    covered |= {"law.16_bits", "law.flat_row", "law.one_token", "law.kept_set", "robustness.largest_floats"}
    assert {each.name for each in QUESTIONS} <= covered


class Simulated(TorchDispatchMode):
    """A device that counts the clones and reads of tensors, and is busy until one is read."""

    def __init__(self):
        super().__init__()
        self.allocated, self.is_busy = 0, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.allocated += function is torch.ops.aten.clone.default
        self.is_busy &= function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))

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
    with Simulated() as made:
        monkeypatch.setattr(cost, "Device", lambda bench: made)
        yield


def asked(target, name, where):
    return ask(Bench(target, None, torch.device(where), QUICK), *chosen([name]))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", COSTLY)
def test_a_simulated_cost_is_found_by_its_question_alone(name):
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
    semantics = replace(Race.semantics, seed_range=taken)


class Short(Strict):
    """As an engine of 31-bit seeds and positions."""

    taken, farthest = (0, 2**31 - 1), 2**31 - 1
    semantics = replace(Race.semantics, seed_range=taken, largest_position=farthest)


class Undeclared(Unsigned):
    """Declares every seed."""

    semantics = Race.semantics


OUT_OF_RANGE = {
    Unsigned: {"randomness.seed_2**63", "randomness.seed_negative"},
    Short: {"randomness.seed_2**32", "randomness.seed_2**63", "randomness.seed_negative", "randomness.position_2**32"},
}


@functools.cache
def results(target):
    bench = Bench(target, None, torch.device("cpu"), FEW_DRAWS)
    return {each.name: ask(bench, each) for each in chosen(SECTIONS)}


@pytest.mark.parametrize("target", OUT_OF_RANGE)
def test_no_question_leaves_the_declared_ranges_and_what_needs_more_is_not_asked_and_says_why(target):
    found = results(target)
    assert [each for each in found.values() if each.outcome is Outcome.FAILED] == []
    refused = {n: r for n, r in found.items() if "seed_range" in r.detail or "largest_position" in r.detail}
    assert set(refused) == OUT_OF_RANGE[target]
    assert {each.outcome for each in refused.values()} == {Outcome.NOT_ASKED}
    assert refused["randomness.seed_negative"].detail == f"declared: seed_range={target.taken}"


def test_a_range_that_is_not_kept_is_a_failure():
    outcomes = {name: each.outcome for name, each in results(Undeclared).items()}
    assert outcomes["randomness.seed_negative"] is outcomes["determinism.paths"] is Outcome.FAILED


@pytest.mark.parametrize(
    "ranges", [{"seed_range": (1, 2**63)}, {"seed_range": (0, 2**16)}, {"largest_position": 2048}], ids=str
)
def test_ranges_too_small_for_any_question_are_refused(ranges):
    with pytest.raises(ValueError, match=r"2\*\*31 - 1"):
        Semantics(**ranges)
