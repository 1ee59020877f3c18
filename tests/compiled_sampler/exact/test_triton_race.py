"""The Triton race wins what the plain torch race wins: interpreted on the CPU, compiled on CUDA.

With masks beside the logits its searches and races are those of a masked copy.

This file also runs as a program, which prints the rows that differ under the interpreter.
"""

import importlib
import itertools
import json
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler.core.order import MASKED_KEY, POSITIVE_INFINITY_KEY
from compiled_sampler.core.rows import RowParams
from compiled_sampler.exact.row_race import race_top_k_in_torch
from tests.builders.races import (
    FILTERED_BY_MIN_P,
    FILTERED_BY_TOP_K,
    LAUNCHES,
    kept_searches,
    masked_at_random,
    race_of,
    race_of_every_kind,
    race_of_flat_rows,
    race_of_masked_rows,
    race_of_prefixes,
    row_params,
    won_by_others,
    won_in_full,
)
from tests.interpreted import cases_that_differ, run_interpreted, with_less_overhead
from tests.tiers import full_argument

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
    differing = {filters: differing_rows(601, "float32", "cpu", filters=filters) for filters in OTHERS}
    differing[QUICK_LAUNCH] = differing_rows(601, "float32", "cpu", QUICK_LAUNCH)
    differing["control"] = differing_rows(129, "float32", "cpu", shifted=2)
    is_full = "--full" in sys.argv
    if is_full:
        differing |= of_all_products()
    json.dump({**differing, "masks": of_masks(is_full)}, sys.stdout)


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
def interpreted(request) -> dict[str, Any]:
    found: dict[str, Any] = run_interpreted(__file__, *full_argument(request))
    return found


def test_the_interpreted_race_wins_what_torchs_does(interpreted):
    """With other filters, under masks, and where it races in parts or is proven by samples."""
    assert {*OTHERS, QUICK_LAUNCH} <= interpreted.keys()
    assert cases_that_differ(interpreted, "control", "masks") == {}


@pytest.mark.full
def test_the_interpreted_race_wins_what_torchs_does_wherever_it_races(interpreted):
    """All launches under all filters; flat rows, prefixes, and rows with fewer tokens than are asked for."""
    assert len(interpreted) > 60
    assert cases_that_differ(interpreted, "control", "masks") == {}


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


MASK_KINDS = ("nothing", "one token", "the last token", "nothing below V", "ten tokens", "half", "all but one", "all")
MASK_SIZES, MASK_DTYPES = (1, 2, 127, 129, 1025), ("float32", "bfloat16", "float16")
SAMPLE = 256
"""Tokens of a small sample: Triton 3.6 compiles none of fewer tokens than threads where masks are read."""
MASK_LAUNCHES: dict[str, dict[str, float]] = {
    "as always": {},
    "small samples": {"_SAMPLE": SAMPLE, "_FEW": 16},
    "short lists, brackets that miss": {"_SAMPLE": SAMPLE, "_CAPACITY": 16, "_DEVIATIONS": -9.0},
    "every row races first": {"_LISTED_TOP_K": 0, "_FEW": -1},
}
COMPARED = {"brackets": (0, 1, 4, 5), "sums": (0, 1, 5)}
"""Fields of a search that mode ``top_k`` writes for every row that it searches."""
UNDER_TOP_P = {"brackets": (2, 3, 4, 5, 6), "sums": (3, 4, 5, 6)}
"""The same of a search for the threshold of top-p alone."""


def visible_tokens(vocab_size: int, generator: torch.Generator) -> Tensor:
    """Which tokens the masks of the kinds leave, bool ``[R, 32 * W]``; of the kinds three rows each."""
    width = -(-vocab_size // 32) * 32
    chosen = torch.rand(3 * len(MASK_KINDS), width, generator=generator)
    for row, kind in enumerate(MASK_KINDS * 3):
        order = chosen[row, :vocab_size].argsort()
        left = {"nothing": order[:0], "one token": order[:1], "ten tokens": order[:10], "half": order[::2]}
        left |= {"the last token": order.new_tensor([vocab_size - 1]), "all but one": order[1:], "all": order}
        chosen[row] = 0
        chosen[row, left.get(kind, order[:0])] = 1
        chosen[row, vocab_size:] = kind != "nothing"  # bits that are never looked at
    return chosen > 0


def packed(visible: Tensor) -> Tensor:
    """The bits in int32 words, in columns of a wider tensor."""
    bits = visible.view(visible.shape[0], -1, 32).to(torch.int64) << torch.arange(32)
    wide = torch.full((visible.shape[0], bits.shape[1] + 5), -1, dtype=torch.int32)
    words = wide[:, 2 : 2 + bits.shape[1]]
    words[:] = bits.sum(-1).to(torch.int32)
    return words


def differing_under_masks(
    vocab_size: int, dtype: str, launch: str, device: str, *, is_control: bool = False
) -> dict[str, list[int]]:
    """Rows whose winner, NaN or search with words beside the logits is not that of a masked copy.

    What is masked is NaN or infinite in some rows. By way of a control each row gets the words of the next.
    """
    generator = torch.Generator().manual_seed(vocab_size)
    visible = visible_tokens(vocab_size, generator)
    seen, count = visible[:, :vocab_size], visible.shape[0]
    row = torch.arange(count)
    logits = torch.randn(count, vocab_size, generator=generator) * torch.where(row % 3 == 0, 0.05, 3.0)[:, None]
    hidden = torch.tensor([torch.nan, torch.inf, 60000.0, 0.0])[row % 4]
    logits = torch.where(seen, logits, hidden[:, None]).to(getattr(torch, dtype))
    logits[row % 11 == 10, vocab_size // 2] = torch.nan
    masked = torch.where(seen, logits, -torch.inf)
    num_seen = seen.sum(-1)
    sizes = torch.stack([row * 0 + 3, num_seen, num_seen + 1, row * 0 + vocab_size // 2, row * 0 + vocab_size], -1)
    top_k = sizes.gather(1, (row // 2 % 5)[:, None])[:, 0].clamp(1, vocab_size)
    is_live = row % 9 != 8
    rows = row_params(
        count,
        vocab_size,
        live=is_live,
        idle=torch.where(is_live, 0, -1).to(torch.int32),
        scale=torch.full((count,), 1.4),
        top_k=top_k,
        min_p_log2=torch.where(row % 4 == 3, -3.0, -torch.inf),
    )
    wanted, magnitudes = race_top_k_in_torch(masked, rows, vocab_size=vocab_size)
    words = packed(visible.roll(1, 0) if is_control else visible)
    won, seen_nan, search = raced(logits, words, rows, vocab_size, launch, device)
    _, _, of_copy = raced(masked, None, rows, vocab_size, launch, device)
    best = wanted[:, 0]
    found = {"winners": torch.where((best >> 32) == MASKED_KEY, (won >> 32) != MASKED_KEY, won != best)}
    found["nan"] = (seen_nan > POSITIVE_INFINITY_KEY) != (magnitudes[:, 0] > POSITIVE_INFINITY_KEY)
    is_searched = is_live & (top_k < vocab_size)
    for name, fields in COMPARED.items():
        found[name] = (search[name] != of_copy[name])[:, fields].any(-1) & is_searched
    return {name: (each & is_live).nonzero().flatten().tolist() for name, each in found.items()}


def raced(
    logits: Tensor, words: Tensor | None, rows: RowParams, vocab_size: int, launch: str, device: str
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Winners ``[R]``, ``nan_bits`` ``[R]`` and what the search left, by the kernels."""
    operators = importlib.import_module("compiled_sampler.exact.triton.operators")
    parameters = rows.live, rows.scale, rows.top_k, rows.top_p, rows.noise_mask, rows.min_p_log2
    given = [each.to(device) for each in (logits, *parameters)], [each.to(device) for each in rows.keys]
    masks = None if words is None else words.to(device)
    with kept_searches(**MASK_LAUNCHES[launch]) as kept:
        winners, magnitudes = operators.race_top_k(*given[0], given[1], masks, vocab_size)
    search = {name: getattr(kept[0], name).cpu() for name in COMPARED}
    return winners[:, 0].cpu(), magnitudes[:, 0].cpu(), search


def differing_under_top_p(vocab_size: int, device: str, *, is_control: bool = False) -> dict[str, list[int]]:
    """Rows under top-p alone whose winner, or search, with words beside the logits is not that of a masked copy.

    All race first and are measured, as no sample proves anything.
    """
    flat = race_of_flat_rows(vocab_size, 24)
    words, masked = masked_at_random(flat.logits, vocab_size)
    race = race_of(masked, flat.rows, vocab_size, flat.rows.live)
    found = list[dict[str, Tensor]]()
    for logits, masks in ((flat.logits, words.roll(1, 0) if is_control else words), (masked, None)):
        there = tree_map_only(Tensor, lambda each: each.to(device), (race._replace(logits=logits), masks))
        with kept_searches(_SAMPLES=0) as kept:
            winners, _ = won_in_full(*there, vocab_size, there[0].known.beyond_candidates)
        search = {name: getattr(kept[0], name).cpu()[:, list(fields)] for name, fields in UNDER_TOP_P.items()}
        found.append({"winners": winners.cpu(), **search})
    differ = {name: (each != found[1][name]).any(-1) & race.known.is_open for name, each in found[0].items()}
    return {name: each.nonzero().flatten().tolist() for name, each in differ.items()}


def of_masks(is_full: bool) -> dict[str, dict[str, list[int]]]:
    cases = [(129, "bfloat16", "as always"), (1025, "float16", "short lists, brackets that miss")]
    if is_full:
        cases += [(size, "float32", "small samples") for size in MASK_SIZES]
        cases += itertools.product([1025], MASK_DTYPES[1:], MASK_LAUNCHES)
    found = {f"{size} {dtype}, {how}": differing_under_masks(size, dtype, how, "cpu") for size, dtype, how in cases}
    sizes = MASK_SIZES[1:] if is_full else (129,)
    found |= {f"{size} under top-p": differing_under_top_p(size, "cpu") for size in sizes}
    found["control"] = differing_under_masks(1025, "float32", "small samples", "cpu", is_control=True)
    found["control under top-p"] = differing_under_top_p(129, "cpu", is_control=True)
    return found


def test_masks_beside_the_logits_are_a_masked_copy_interpreted(interpreted):
    found = dict(interpreted["masks"])
    controls = [found.pop(name) for name in ("control", "control under top-p")]
    assert len(found) >= 3
    assert {case: each for case, each in found.items() if any(each.values())} == {}
    assert all(len(control[name]) >= 5 for control in controls for name in ("winners", "brackets", "sums"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", MASK_DTYPES)
@pytest.mark.parametrize("launch", MASK_LAUNCHES)
def test_masks_beside_the_logits_are_a_masked_copy(launch, dtype):
    for vocab_size in (*MASK_SIZES, 151_936):
        assert not any(differing_under_masks(vocab_size, dtype, launch, "cuda").values()), vocab_size


@pytest.mark.gpu
def test_masks_beside_the_logits_are_a_masked_copy_under_top_p():
    for vocab_size in (*MASK_SIZES[1:], 151_936):
        assert not any(differing_under_top_p(vocab_size, "cuda").values()), vocab_size


if __name__ == "__main__":
    with with_less_overhead():
        main()
