"""Parts in processes: everything arrives, and an error too."""

import functools

import pytest
import torch

from compiled_sampler.conformance.processes.pool import in_processes


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
