"""The host's part of a step: calls that take turns, the table, and on a GPU what a step asks of the driver."""

import itertools

import pytest
import torch

from compiled_sampler import Sampler
from tools.bench import __main__ as bench
from tools.bench import python_alone
from tools.bench.host import (
    COPY,
    ROUND,
    asked_of_the_driver,
    bare_calls,
    in_turns,
)
from tools.bench.host_steps import num_slots, sampled_steps

ASKED = {
    "kept plan, out=": {"graphs": 1, "launches": 0, "copies": 0, "allocations": 0},
    "kept plan, out='ring'": {"graphs": 1, "launches": 0, "copies": 0, "allocations": 0},
    "kept plan": {"graphs": 1, "launches": 1, "copies": 0, "allocations": 2},
    "another batch": {"graphs": 1, "launches": 0, "copies": 0, "allocations": 0},
    "one request leaves, another comes": {"graphs": 1, "launches": 0, "copies": 0, "allocations": 0},
}
"""What a step of tensors that came back asks for: a launch for new ``out``, and no copy."""
VERIFIED = "verify, new ragged plan", "verify, other drafts of a plan", "3 drafts, verify, kept plan"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("step", ASKED)
def test_a_step_asks_the_driver_for_no_more_than_it_must(step):
    logits = torch.randn(8, 3000, device="cuda")
    sampler = Sampler(3000, num_slots(8), "cuda", buckets=[8])
    sampler.bind_logits(logits)
    sampler.warmup(modes=["full"])
    with sampled_steps(sampler, logits, 8) as steps:
        call = steps[step, "mixed modes"]
        for _ in range(5):
            call()
        found = asked_of_the_driver(call)
    assert {kind: found[kind] for kind in ASKED[step]} == ASKED[step]
    assert found["waits"] < 0.5  # the profiler itself waits once or twice in all


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_the_bare_calls_of_the_floor_are_one_copy_and_one_launch():
    for (call, _), bare in bare_calls(torch.device("cuda", 0)).items():
        bare()
        found = asked_of_the_driver(bare)
        assert (found["copies"], found["graphs"], found["launches"]) == ((1, 0, 0) if call == COPY else (0, 1, 0))


def test_on_a_cpu_every_step_replays_a_variant_that_came_back(monkeypatch, capsys):
    monkeypatch.setattr(python_alone, "_SECONDS", 0.0)
    made, coverage = python_alone.replaying_nothing, []

    def noted(sampler: Sampler) -> Sampler:
        coverage.append(sampler)
        return made(sampler)

    monkeypatch.setattr(python_alone, "replaying_nothing", noted)
    bench.main(["--host", "--device", "cpu", "--rows", "2", "--requests", "3"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*ASKED, *VERIFIED, "B=2", "B=3"))
    for sampler in coverage:
        served = sampler.statistics()
        assert served.direct_runs == 0
        in_place = sum(count for name, count in served.coverage.items() if "seen with" in name)
        assert in_place > 0.9 * served.replays, served.coverage


def test_every_call_has_one_round_a_turn_after_a_wait_in_orders_that_differ(monkeypatch):
    monkeypatch.setattr("tools.bench.host.time.monotonic", itertools.count().__next__)
    made: list[str] = []

    def named(name: str, us: int):
        return lambda: made.append(name) or 1000 * us

    calls = {"a": named("a", 1), "b": named("b", 2), "c": named("c", 3)}
    found = in_turns(calls, 20.0, lambda: made.append("wait"))
    assert found == {"a": [1.0] * 20, "b": [2.0] * 20, "c": [3.0] * 20}
    rounds = [made[i : i + ROUND + 1] for i in range(0, len(made), ROUND + 1)]
    assert all(each[0] == "wait" and len({*each[1:]}) == 1 for each in rounds)
    turns = ["".join(each[1] for each in rounds[i : i + 3]) for i in range(0, len(rounds), 3)]
    assert len(turns) == 21  # the first does not count
    assert {"".join(sorted(turn)) for turn in turns} == {"abc"}
    assert len({*turns}) > 3


def test_a_slow_call_of_a_round_does_not_move_its_median():
    times = itertools.cycle([1000] * (ROUND - 1) + [10**9])
    assert in_turns({"a": times.__next__}, 0.0, lambda: None) == {"a": [1.0]}
