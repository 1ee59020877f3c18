"""Seeds and positions stay within what an adapter declares; a question that needs others is not asked, and says why."""

import functools

import pytest
import torch

from compiled_sampler.conformance import Bench, Effort, Outcome, Semantics, ask, chosen
from tests.compiled_sampler.conformance.adapters.race_adapter import Race

BRIEF = Effort(2**11, 2**11, 2**9, 2**7, 1, 100, 1.0, 1.0, 200)
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
    bench = Bench(target, None, torch.device("cpu"), BRIEF)
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
