"""Times of calls that take turns: where a machine changes its speed for seconds, it does so for all of them alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Timed = Callable[[], int]
"""A call that returns how many nanoseconds of it count."""
Name = TypeVar("Name", bound=Hashable)
ROUND = 50
"""Calls of a round."""
LOW = 0.1
"""The quantile of rounds that tells what a call takes where the machine is fast."""


def timed(step: Callable[[], object]) -> Timed:
    """A call of a step all of which counts."""

    def call() -> int:
        start = time.perf_counter_ns()
        step()
        return time.perf_counter_ns() - start

    return call


def in_turns(calls: Mapping[Name, Timed], seconds: float, wait: Callable[[], object]) -> dict[Name, list[float]]:
    """The median microseconds of a call in each of its rounds, by name.

    All calls have a round in each turn, in an order that is drawn anew; a first turn is not counted.

    Args:
        calls: by name.
        seconds: after which no further turn begins; one is counted in any case.
        wait: called before each round, for what earlier calls left to a device.
    """
    chance, order = random.Random(0), list(calls)
    found: dict[Name, list[float]] = {name: [] for name in calls}
    for name in order:
        _round_us(calls[name], wait)
    end = time.monotonic() + seconds
    while True:
        chance.shuffle(order)
        for name in order:
            found[name].append(_round_us(calls[name], wait))
        if time.monotonic() >= end:
            return found


def _round_us(call: Timed, wait: Callable[[], object]) -> float:
    wait()
    return statistics.median([call() for _ in range(ROUND)]) / 1e3


def low_of(rounds: list[float]) -> float:
    """The quantile ``LOW`` of the medians of rounds."""
    return sorted(rounds)[int(LOW * len(rounds))]
