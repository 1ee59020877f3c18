"""The Triton race wins what the plain torch race wins: interpreted on the CPU, compiled on CUDA.

This file also runs as a program, which prints the rows that differ under the interpreter.
"""

import itertools
import json
import sys

import pytest

from tests.builders.races import (
    FILTERED_BY_MIN_P,
    FILTERED_BY_TOP_K,
    LAUNCHES,
    race_of_every_kind,
    race_of_flat_rows,
    race_of_masked_rows,
    race_of_prefixes,
    won_by_others,
)
from tests.interpreted import run_interpreted, with_less_overhead
from tests.tiers import full_argument, tiers

INTERPRETED = [(1, "float32"), (129, "bfloat16"), (1025, "float32"), (1025, "float16")]
MASKED = (("all", "as always"), ("top_k", "as always"), ("top_k", "proofs by up to nine samples"))  # of few tokens
PROOFS = ("no proofs", "proofs by up to nine samples")
SUMMED = ("short lists", "brackets that miss")
ALL = ("all", "all and masks")
QUICK_LAUNCH = "proofs by up to nine samples"
SEARCHED = (*FILTERED_BY_TOP_K, "all and masks")
OTHERS = (*FILTERED_BY_MIN_P, *SEARCHED)
"""Filters and masks of a race, see ``won_by_others``."""


def differing_rows(
    vocab_size: int, dtype: str, device: str, launch: str = "as always", shifted: int = 0, filters: str = "all"
) -> list[int]:
    """Rows of every kind where Triton's winner is not torch's; arguments as ``won_by_others``."""
    return won_by_others(race_of_every_kind(vocab_size, dtype), vocab_size, device, launch, shifted, filters)


def main() -> None:
    """Print, as JSON, the rows that differ in each case, and in the control."""
    differing = {filters: differing_rows(601, "float32", "cpu", filters=filters) for filters in OTHERS}
    differing[QUICK_LAUNCH] = differing_rows(601, "float32", "cpu", QUICK_LAUNCH)
    differing["control"] = differing_rows(129, "float32", "cpu", shifted=2)
    if "--full" in sys.argv:
        differing |= of_all_products()
    json.dump(differing, sys.stdout)


def of_all_products() -> dict[str, list[int]]:
    """The rows that differ in the cases of the second tier."""
    differing = {f"{size} {dtype}": differing_rows(size, dtype, "cpu") for size, dtype in INTERPRETED}
    differing |= {launch: differing_rows(601, "float32", "cpu", launch) for launch in LAUNCHES}
    for filters, launch in itertools.product(SEARCHED, LAUNCHES):
        differing[f"{filters}, {launch}"] = differing_rows(601, "float16", "cpu", launch, 0, filters)
    flat = race_of_flat_rows(601, 48)
    for filters, launch in itertools.product(ALL, PROOFS):
        differing[f"flat, {filters}, {launch}"] = won_by_others(flat, 601, "cpu", launch, 0, filters)
    prefixes = race_of_prefixes(601, 24)
    for filters, launch in itertools.product(ALL, SUMMED):
        differing[f"prefixes, {filters}, {launch}"] = won_by_others(prefixes, 601, "cpu", launch, 0, filters)
    masked = race_of_masked_rows(601, 64)
    differing |= {f"masked, {how}": won_by_others(masked, 601, "cpu", how[1], 0, how[0]) for how in MASKED}
    return differing


@pytest.fixture(scope="module")
def interpreted(request) -> dict[str, list[int]]:
    """The rows that differ, by case, of the kernel in Triton's interpreter."""
    found: dict[str, list[int]] = run_interpreted(__file__, *full_argument(request))
    return found


@pytest.mark.full
@pytest.mark.parametrize(("vocab_size", "dtype"), INTERPRETED)
def test_the_interpreted_race_wins_what_torchs_does(interpreted, vocab_size, dtype):
    assert interpreted[f"{vocab_size} {dtype}"] == []


@pytest.mark.parametrize("launch", tiers([QUICK_LAUNCH], LAUNCHES))
def test_where_a_row_races_changes_nothing_interpreted(interpreted, launch):
    assert interpreted[launch] == []


@pytest.mark.parametrize("filters", OTHERS)
def test_rows_with_other_filters_win_what_torchs_do_interpreted(interpreted, filters):
    assert interpreted[filters] == []


@pytest.mark.full
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("filters", SEARCHED)
def test_where_a_row_with_other_filters_races_changes_nothing_interpreted(interpreted, filters, launch):
    assert interpreted[f"{filters}, {launch}"] == []


@pytest.mark.full
@pytest.mark.parametrize("launch", PROOFS)
@pytest.mark.parametrize("filters", ALL)
def test_what_part_of_a_row_proves_is_true_interpreted(interpreted, filters, launch):
    assert interpreted[f"flat, {filters}, {launch}"] == []


@pytest.mark.full
@pytest.mark.parametrize("launch", SUMMED)
@pytest.mark.parametrize("filters", ALL)
def test_the_mass_of_what_top_k_keeps_is_that_of_torch_interpreted(interpreted, filters, launch):
    assert interpreted[f"prefixes, {filters}, {launch}"] == []


@pytest.mark.full
@pytest.mark.parametrize("how", MASKED)
def test_rows_with_fewer_tokens_than_are_asked_for_win_what_torchs_do_interpreted(interpreted, how):
    assert interpreted[f"masked, {how}"] == []


def test_other_noise_has_other_winners(interpreted):
    assert len(interpreted["control"]) >= 10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("vocab_size", [1, 65, 4097, 151_936])
def test_the_compiled_race_wins_what_torchs_does(vocab_size, dtype):
    assert differing_rows(vocab_size, dtype, "cuda") == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_where_a_row_races_changes_nothing(launch, dtype):
    assert differing_rows(151_936, dtype, "cuda", launch) == []


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [1, 4097, 151_936])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("filters", OTHERS)
def test_rows_with_other_filters_win_what_torchs_do(filters, dtype, vocab_size):
    assert differing_rows(vocab_size, dtype, "cuda", filters=filters) == []


@pytest.mark.gpu
@pytest.mark.parametrize("launch", ["as always", "no proofs"])
@pytest.mark.parametrize("filters", ALL)
def test_what_part_of_a_row_proves_is_true(filters, launch):
    assert won_by_others(race_of_flat_rows(151_936, 96), 151_936, "cuda", launch, 0, filters) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("filters", "launch"), MASKED)
def test_rows_with_fewer_tokens_than_are_asked_for_win_what_torchs_do(filters, launch):
    race = race_of_masked_rows(151_936, 100)
    assert won_by_others(race, 151_936, "cuda", launch, 0, filters) == []


@pytest.mark.gpu
def test_other_noise_has_other_winners_on_cuda():
    assert len(differing_rows(129, "float32", "cuda", shifted=2)) >= 10


@pytest.mark.gpu
@pytest.mark.parametrize("launch", SUMMED)
@pytest.mark.parametrize("filters", ALL)
def test_the_mass_of_what_top_k_keeps_is_that_of_torch(filters, launch):
    assert won_by_others(race_of_prefixes(151_936, 24), 151_936, "cuda", launch, 0, filters) == []


if __name__ == "__main__":
    with with_less_overhead():
        main()
