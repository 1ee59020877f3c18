"""The Triton search finds the threshold that the sort defines: interpreted on the CPU, compiled on CUDA.

Of rows whose sample says little a list holds what is searched, so that no row is read twice.

This file also runs as a program, which prints the rows that differ under the interpreter.
"""

import importlib
import json
import sys
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from compiled_sampler.core import reference
from compiled_sampler.core.mass import exp2_mass, scaled_logits
from compiled_sampler.core.noise import noise_keys
from compiled_sampler.core.order import MASKED_KEY, key_float, order_key, row_logits
from tests.builders.races import kept_searches, poisoned_rows
from tests.cases.hard_rows import KINDS
from tests.interpreted import cases_that_differ, run_interpreted, with_less_overhead
from tests.tiers import full_argument

INTERPRETED = [
    (1, "float32"),
    (2, "float16"),
    (129, "float32"),
    (129, "bfloat16"),
    (4097, "float32"),
    (9001, "bfloat16"),
]
"""Vocabularies of one token, less than a tile, tiles and a token, and more tokens than the sample."""

QUICK, QUICK_LAUNCH = [(129, "bfloat16"), (4097, "float32")], "wide brackets, short lists"
USUAL = "as always"
LAUNCHES: dict[str, dict[str, float]] = {
    USUAL: {},
    "a program for several tiles": {"_PROGRAMS": 3 * len(KINDS) - 1},
    "a single program": {"_PROGRAMS": 1},
    "short lists": {"_CAPACITY": 24},
    "brackets that miss": {"_DEVIATIONS": -9.0},
    "brackets of the whole row": {"_DEVIATIONS": 1e9},
    "wide brackets, short lists": {"_DEVIATIONS": 1e9, "_CAPACITY": 24},
    "lists of many tiles": {"_RESIDENT": 1, "_WARPS": 1, "_DEVIATIONS": 9.0},
    "few pivots": {"_PIVOTS": 2},
    "lists of what is kept": {"_FEW": 2**30},
}
"""Constants of ``operators.py`` that decide how long the search takes, but not what it finds."""

_SCALES = (1.442695, 0.1, 144269.5, 1.4e-30)
_TOP_P = (0.5, 1.0, 0.9, 0.999, 1e-9, 1.0 - 2.0**-53, 0.25)


def case_id(vocab_size: int, dtype: str, base_is_row: bool) -> str:
    return f"{vocab_size} {dtype} {'all' if base_is_row else 'top_k'}"


def rows_of_every_kind(vocab_size: int, dtype: str, turn: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits with poisoned columns beyond V and an odd stride, and each row's scale, top_k and top_p.

    Another ``turn`` gives the rows each other's parameters.
    """
    count, logits = len(KINDS), poisoned_rows(vocab_size, dtype)
    logits[::2, vocab_size:] = torch.nan
    sizes = (vocab_size, 3, vocab_size // 2 + 1, vocab_size - 1, vocab_size)
    order = range(turn, turn + count)
    top_k = torch.tensor([min(max(1, sizes[row % len(sizes)]), vocab_size) for row in order])
    top_p = torch.tensor([_TOP_P[row % len(_TOP_P)] for row in order], dtype=torch.float64)
    return logits, (torch.tensor([_SCALES[row % len(_SCALES)] for row in order]), top_k, top_p)


def differing_rows(
    vocab_size: int, dtype: str, base_is_row: bool, device: str, launch: str = USUAL, wrong: int = 0
) -> list[int]:
    """Rows where the search and the sort disagree, or that were touched without need.

    Any threshold serves a row without a token that can be drawn; it counts only where the row is not open.
    ``wrong`` is added to every top_p's exponent for the search alone, by way of a control.
    """
    logits, (scale, top_k, top_p) = rows_of_every_kind(vocab_size, dtype, list(LAUNCHES).index(launch))
    if device == "cpu" and dtype == "bfloat16":
        logits[logits.abs() < 2.0**-126] = 0.0  # the interpreter misreads bfloat16 denormals
    is_open = (top_k < vocab_size) | (top_p < 1.0)
    is_open[3::5] = False
    parameters = (scale, top_k, top_p)
    drawable = (logits[:, :vocab_size] > -torch.inf).any(-1)
    launches = importlib.import_module("compiled_sampler.exact.triton.operators")
    with ExitStack() as changed:
        for name, value in LAUNCHES[launch].items():
            changed.enter_context(mock.patch.object(launches, name, value))
        differs = searched_otherwise(logits, is_open, parameters, vocab_size, base_is_row, device, wrong)
    return (differs & (drawable | ~is_open)).nonzero().flatten().tolist()


def searched_otherwise(
    logits: Tensor,
    is_open: Tensor,
    parameters: tuple[Tensor, ...],
    vocab_size: int,
    base_is_row: bool,
    device: str,
    wrong: int = 0,
) -> Tensor:
    """True where the search of open rows and the sort disagree, or another row was touched: bool ``[R]``."""
    scale, top_k, top_p = parameters
    packed = torch.arange(len(logits)) * 10**12 - 5 * 10**12
    wanted = reference.threshold(logits, scale, top_k, top_p, vocab_size=vocab_size, base_is_row=base_is_row)
    row_max = key_float(order_key(row_logits(logits, vocab_size)).amax(-1))
    row_mass = exp2_mass(scaled_logits(row_logits(logits, vocab_size), row_max[:, None], scale[:, None])).sum(-1)
    tensors = (logits, packed, is_open, row_mass, row_max, scale, top_k, top_p * 2.0**-wrong)
    search = importlib.import_module("compiled_sampler.exact.triton.operators").search_threshold
    found = search(*(each.to(device) for each in tensors), vocab_size, base_is_row).cpu()
    return found != torch.where(is_open, wanted, packed)


def adversarial_rows(device: str) -> list[int]:
    """Rows where the search and the sort disagree, of some that samples, floats or lists do not do justice.

    Cuts above the mass of the row, which float64 rounds up; a token or a run that no sample meets and that has most of
    the mass; masks that are finite; ties that fill more than a list; both filters' last tokens among the same ties.
    """
    vocab_size = 20_011
    noise = torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(0))
    logits = 0.01 * noise
    logits[4:6] = 3.0 * noise[4:6]
    logits[4, 8:24] = 30.0
    logits[5, 1000:19_000:7] = -torch.inf
    logits[6:9] = torch.where(noise[6:9] > 1.5, noise[6:9], torch.finfo().min)
    logits[9:12] = (noise[9:12] > 1.0).float()
    logits[12:16] = (2.0 * noise[12:16]).round()
    top_p = torch.tensor([1.0 - 2.0**-53, 0.9, 0.7, 0.99], dtype=torch.float64).repeat_interleave(4)
    top_k = torch.full((16,), vocab_size)
    top_k[5::2] = torch.tensor([3000, 700, 2000, 15_000, 4000, 9000])
    parameters = (torch.full((16,), 1.442695), top_k, top_p)
    is_open = torch.ones(16, dtype=torch.bool)
    rows = [searched_otherwise(logits, is_open, parameters, vocab_size, base, device) for base in (False, True)]
    return (rows[0] | rows[1]).nonzero().flatten().tolist()


def main() -> None:
    is_full = "--full" in sys.argv
    differing = {
        case_id(*case, base_is_row): differing_rows(*case, base_is_row, "cpu")
        for case in (INTERPRETED if is_full else QUICK)
        for base_is_row in (False, True)
    }
    launches = LAUNCHES if is_full else [QUICK_LAUNCH]
    differing |= {launch: differing_rows(3001, "float32", False, "cpu", launch) for launch in launches}
    differing["control"] = differing_rows(129, "float32", False, "cpu", wrong=1)
    if is_full:
        differing["adversarial"] = adversarial_rows("cpu")
    json.dump({**differing, "brackets": brackets("cpu")}, sys.stdout)


@pytest.fixture(scope="module")
def interpreted(request) -> dict[str, Any]:
    """The rows that differ, by case, of the kernel in Triton's interpreter, and brackets."""
    found: dict[str, Any] = run_interpreted(__file__, *full_argument(request))
    return found


def test_the_interpreted_search_finds_what_the_sort_defines(interpreted):
    """Also where brackets are wide and lists short."""
    assert {case_id(*QUICK[0], True), case_id(*QUICK[1], False), QUICK_LAUNCH} <= interpreted.keys()
    assert cases_that_differ(interpreted, "control", "brackets") == {}


@pytest.mark.full
def test_the_interpreted_search_finds_what_the_sort_defines_however_it_is_launched(interpreted):
    """Rows made to mislead it among them."""
    assert {*LAUNCHES, "adversarial"} <= interpreted.keys()
    assert cases_that_differ(interpreted, "control", "brackets") == {}


def test_another_top_p_finds_other_thresholds(interpreted):
    assert len(interpreted["control"]) >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("base_is_row", [False, True], ids=["top_k", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("vocab_size", [65, 129, 4097, 151_936])
def test_the_compiled_search_finds_what_the_sort_defines(vocab_size, dtype, base_is_row):
    assert differing_rows(vocab_size, dtype, base_is_row, "cuda") == []


@pytest.mark.gpu
@pytest.mark.parametrize("base_is_row", [False, True], ids=["top_k", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_how_it_is_launched_and_what_the_sample_says_change_nothing(launch, dtype, base_is_row):
    assert differing_rows(151_936, dtype, base_is_row, "cuda", launch) == []


@pytest.mark.gpu
def test_rows_made_to_mislead_the_search_do_not():
    assert adversarial_rows("cuda") == []


@pytest.mark.gpu
def test_another_top_p_finds_other_thresholds_on_cuda():
    assert len(differing_rows(129, "float32", False, "cuda", wrong=1)) >= 3


LONG, SAMPLE, FEW = 2048, 64, 256
LOWEST_KEY, HIGHEST_KEY = MASKED_KEY + 1, -(MASKED_KEY + 1)
BRACKET_K = (1500, 1500, 1500, 1500, 3, LONG)
VISIBLE = ((), (700,), tuple(range(100, 130)), tuple(range(LONG)), (700, 701, 702, 703), (700,))
"""Tokens that the masks leave; of the first three rows and the last two none is in the sample."""
SPARSE_K, SPARSE = 512, (*range(13, 512), *range(528, 541))
"""Of a row's first tokens a sample has 16 on the average, and 3 of these: once in 30,000 samples, or less."""


def brackets(device: str) -> list[list[int]]:
    operators = importlib.import_module("compiled_sampler.exact.triton.operators")
    count, logits = len(BRACKET_K) + 1, torch.full((len(BRACKET_K) + 1, LONG), -torch.inf)
    for row, ids in enumerate(VISIBLE):
        logits[row, list(ids)] = torch.linspace(-1.0, 2.0, len(ids))
    logits[-1] = -10.0 - torch.arange(LONG) / LONG
    logits[-1, list(SPARSE)] += 20.0
    rows = torch.arange(count)
    ones, top_k = torch.ones(count), torch.tensor((*BRACKET_K, SPARSE_K))
    parameters = rows >= 0, ones, top_k, ones.double(), torch.full((count,), -1, dtype=torch.int32), ones * -torch.inf
    given = logits, *parameters
    keys = [each.to(device) for each in noise_keys(rows, rows + 7, 0)]
    with kept_searches(_SAMPLE=SAMPLE, _FEW=FEW) as searches:
        operators.race_top_k(*(each.to(device) for each in given), keys, None, LONG)
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
    last_kept = int(order_key(torch.tensor(10.0 - 540 / LONG)))
    assert ends[6][0] <= last_kept <= ends[6][1]


def test_rows_of_which_the_sample_says_little_are_listed_interpreted(interpreted):
    check(interpreted["brackets"])


@pytest.mark.gpu
def test_rows_of_which_the_sample_says_little_are_listed():
    check(brackets("cuda"))


if __name__ == "__main__":
    with with_less_overhead():
        main()
