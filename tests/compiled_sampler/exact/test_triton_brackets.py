"""Brackets of rows whose sample says little: a list then holds what is searched, so that no row is read twice.

This file also runs as a program, which prints the brackets under the interpreter.
"""

import importlib
import json
import sys

import pytest
import torch

from compiled_sampler.core.noise import noise_keys
from compiled_sampler.core.order import MASKED_KEY, order_key
from tests.builders.searches import kept_searches
from tests.interpreted import run_interpreted, with_less_overhead

V, SAMPLE, FEW = 2048, 64, 256
LOWEST_KEY, HIGHEST_KEY = MASKED_KEY + 1, -(MASKED_KEY + 1)
TOP_K = (1500, 1500, 1500, 1500, 3, V)
VISIBLE = ((), (700,), tuple(range(100, 130)), tuple(range(V)), (700, 701, 702, 703), (700,))
"""Tokens that the masks leave; of the first three rows and the last two none is in the sample."""
SPARSE_K, SPARSE = 512, (*range(13, 512), *range(528, 541))
"""Of a row's first tokens a sample has 16 on the average, and 3 of these: once in 30,000 samples, or less."""


def brackets(device: str) -> list[list[int]]:
    """The fields of each row's brackets after a race under top-k."""
    operators = importlib.import_module("compiled_sampler.exact.triton.operators")
    count, logits = len(TOP_K) + 1, torch.full((len(TOP_K) + 1, V), -torch.inf)
    for row, ids in enumerate(VISIBLE):
        logits[row, list(ids)] = torch.linspace(-1.0, 2.0, len(ids))
    logits[-1] = -10.0 - torch.arange(V) / V
    logits[-1, list(SPARSE)] += 20.0
    rows = torch.arange(count)
    given = (
        logits, rows >= 0, torch.ones(count), torch.tensor((*TOP_K, SPARSE_K)), torch.ones(count, dtype=torch.float64),
        torch.full((count,), -1, dtype=torch.int32), torch.full((count,), -torch.inf),
    )  # fmt: skip
    keys = [each.to(device) for each in noise_keys(rows, rows + 7, 0)]
    with kept_searches(_SAMPLE=SAMPLE, _FEW=FEW) as searches:
        operators.race_top_k(*(each.to(device) for each in given), keys, None, V)
    found: list[list[int]] = searches[0].brackets.tolist()
    return found


def check(found: list[list[int]]) -> None:
    """Rows without a token in the sample list all that can be drawn, the others what a filter may cut, at least."""
    ends = [(first, last) for first, last, *_ in found]
    assert ends[:3] == [(LOWEST_KEY, HIGHEST_KEY)] * 3
    assert MASKED_KEY < ends[3][0] < ends[3][1] < HIGHEST_KEY
    assert ends[4] == (LOWEST_KEY, HIGHEST_KEY)
    assert ends[5] == (HIGHEST_KEY, MASKED_KEY)  # top-k keeps all: nothing is searched
    assert [row[4] for row in found[:5]] == [1, 1, 1, 0, 1]  # what is above the bracket is listed, where it is little
    last_kept = int(order_key(torch.tensor(10.0 - 540 / V)))
    assert ends[6][0] <= last_kept <= ends[6][1]


def test_rows_of_which_the_sample_says_little_are_listed_interpreted():
    check(run_interpreted(__file__))


@pytest.mark.gpu
def test_rows_of_which_the_sample_says_little_are_listed():
    check(brackets("cuda"))


if __name__ == "__main__":
    with with_less_overhead():
        json.dump(brackets("cpu"), sys.stdout)
