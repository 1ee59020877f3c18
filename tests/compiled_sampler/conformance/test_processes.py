"""Parts in processes: everything arrives, and an error too."""

import functools
import multiprocessing
import os

import pytest
import torch

from compiled_sampler.conformance import QUICK, Bench, chosen
from compiled_sampler.conformance import runner as runs
from compiled_sampler.conformance.processes.pool import in_processes
from tests.compiled_sampler.conformance.race_adapter import Race


class DiesElsewhere(Race):
    """Ends every process but the one that runs the questions."""

    def __init__(self, vocab_size, device):
        if multiprocessing.parent_process() is not None:
            os._exit(3)
        super().__init__(vocab_size, device)


def numbers(first: int) -> list[tuple[int, int]]:
    return [(first + i, torch.get_num_threads()) for i in range(3)]


def failing() -> list[int]:
    raise ArithmeticError("planted")


def test_what_every_part_yields_arrives():
    made = list(in_processes([functools.partial(numbers, 0), functools.partial(numbers, 10)]))
    assert sorted(number for number, _ in made) == [0, 1, 2, 10, 11, 12]
    assert all(threads >= 1 for _, threads in made)


def test_what_a_part_raises_is_raised():
    with pytest.raises(ArithmeticError, match="planted"):
        list(in_processes([failing, functools.partial(numbers, 0)]))


def test_a_question_whose_process_ends_has_failed_and_the_run_goes_on(monkeypatch):
    monkeypatch.setattr(runs, "has_many_processors", lambda: True)
    bench = Bench(DiesElsewhere, f"{__name__}:DiesElsewhere", torch.device("cpu"), QUICK)
    first, second = runs.run(bench, chosen(["robustness.single_token", "verification.one_hot"]))
    assert {first.question: first.outcome, second.question: second.outcome} == {
        "robustness.single_token": "passed",
        "verification.one_hot": "failed",
    }
    assert "BrokenProcessPool" in first.detail + second.detail
