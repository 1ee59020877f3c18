"""Brackets of rows that masks leave few tokens of: a list then holds them all, so that no row is read twice.

This file also runs as a program, which prints the brackets under the interpreter.
"""

import importlib
import json
import sys
from typing import Any
from unittest import mock

import pytest
import torch

from compiled_sampler.core.noise import noise_keys
from compiled_sampler.core.order import MASKED_KEY
from tests.interpreted import run_interpreted, with_less_overhead

V, SAMPLE = 2048, 64
LOWEST_KEY, HIGHEST_KEY = MASKED_KEY + 1, -(MASKED_KEY + 1)
TOP_K = (1500, 1500, 1500, 1500, 3, V)
VISIBLE = ((), (700,), tuple(range(100, 130)), tuple(range(V)), (700, 701, 702, 703), (700,))
"""Tokens that the masks leave; of the first three rows and the last two none is in the sample."""


def brackets(device: str) -> list[list[int]]:
    """The fields of each row's brackets after a race under top-k."""
    operators = importlib.import_module("compiled_sampler.exact.triton.operators")
    launches = importlib.import_module("compiled_sampler.exact.triton.launches")
    searches: list[Any] = []
    empty = launches.empty_search

    def kept(*given: Any) -> Any:
        searches.append(empty(*given))
        return searches[-1]

    count, logits = len(TOP_K), torch.full((len(TOP_K), V), -torch.inf)
    for row, ids in enumerate(VISIBLE):
        logits[row, list(ids)] = torch.linspace(-1.0, 2.0, len(ids))
    rows = torch.arange(count)
    given = (
        logits, rows >= 0, torch.ones(count), torch.tensor(TOP_K), torch.ones(count, dtype=torch.float64),
        torch.full((count,), -1, dtype=torch.int32), torch.full((count,), -torch.inf),
    )  # fmt: skip
    keys = [each.to(device) for each in noise_keys(rows, rows + 7, 0)]
    with mock.patch.object(operators, "empty_search", kept), mock.patch.object(launches, "_SAMPLE", SAMPLE):
        operators.race_top_k(*(each.to(device) for each in given), keys, V)
    found: list[list[int]] = searches[0].brackets.tolist()
    return found


def check(found: list[list[int]]) -> None:
    """Rows without a token in the sample list all that can be drawn, the others what a filter may cut."""
    ends = [(first, last) for first, last, *_ in found]
    assert ends[:3] == [(LOWEST_KEY, HIGHEST_KEY)] * 3
    assert MASKED_KEY < ends[3][0] < ends[3][1] < HIGHEST_KEY
    assert ends[4] == (LOWEST_KEY, HIGHEST_KEY)
    assert ends[5] == (HIGHEST_KEY, MASKED_KEY)  # top-k keeps all: nothing is searched
    assert [row[4] for row in found[:5]] == [1] * 5  # what is above the bracket is listed, too


def test_rows_without_a_token_in_the_sample_list_all_that_can_be_drawn_interpreted():
    check(run_interpreted(__file__))


@pytest.mark.gpu
def test_rows_without_a_token_in_the_sample_list_all_that_can_be_drawn():
    check(brackets("cuda"))


if __name__ == "__main__":
    with with_less_overhead():
        json.dump(brackets("cpu"), sys.stdout)
