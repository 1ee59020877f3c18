"""Calls that take turns: every call has a round in each turn, in orders that differ."""

import itertools

from tools.bench.host import ROUND, in_turns, low_of


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


def test_the_low_quantile_is_that_of_the_fastest_tenth():
    assert low_of([float(n) for n in range(100, 0, -1)]) == 11.0
    assert low_of([3.0]) == 3.0
