"""The Triton race wins what the plain torch race wins: interpreted on the CPU, compiled on CUDA.

This file also runs as a program, which prints the rows that differ under the interpreter.
"""

import importlib
import json
import sys
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from compiled_sampler.batch import NoiseKeys, Rows
from compiled_sampler.filters import KEEP_ALL
from compiled_sampler.mass import exp2_mass, scaled_logits
from compiled_sampler.noise import noise_keys
from compiled_sampler.order import MASKED_KEY, row_logits
from compiled_sampler.wide import Found, Threshold, sorted_threshold
from compiled_sampler.wide_race import race_beyond
from tests.interpreted import run_interpreted
from tools.hard_rows import KINDS

INTERPRETED = [(1, "float32"), (129, "bfloat16"), (1025, "float32"), (1025, "float16")]
PARTS = (1, 3, 64)
LAUNCHES: dict[str, dict[str, float]] = {
    "as always": {},
    "lists of all that is kept": {"_FEW": 2**30},
    "no lists": {"_FEW": -1},
    "short lists": {"_FEW": 2**30, "_CAPACITY": 24},
    "brackets that miss": {"_FEW": 2**30, "_DEVIATIONS": -9.0},
}
"""Constants of the search that decide whether a row races in its list."""

_SCALES = (1.442695, 0.1, 144269.5, 1.4e-30)
_MIN_P = (-torch.inf, -10.0, -0.5, -torch.inf, 0.0)
_TOP_P = (1.0, 0.5, 1.0, 0.9, 0.999, 1.0, 1e-9)


def race_of_every_kind(vocab_size: int, dtype: str) -> tuple[Tensor, Threshold, Rows, Tensor, Tensor]:
    """Logits with poisoned columns beyond V, and the other arguments of ``race_beyond``, the threshold as sorted.

    Rows race that have to be searched, and some that keep all tokens; of both some do not.
    """
    count = len(KINDS)
    noise = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits = torch.full((count, vocab_size + 3), torch.inf).to(getattr(torch, dtype))
    for row, kind in enumerate(KINDS):
        logits[row, :vocab_size] = kind(noise[row : row + 1])[0]
    if dtype == "bfloat16":
        logits[logits.abs() < 2.0**-126] = 0.0  # the interpreter misreads bfloat16 denormals
    row = torch.arange(count)
    sizes = (vocab_size, 3, vocab_size // 2 + 1, vocab_size, max(1, vocab_size // 50))
    rows = Rows(
        live=row >= 0,
        keys=noise_keys(row * 12345678901, row + 2**40, 0),
        scale=torch.tensor([_SCALES[i % len(_SCALES)] for i in range(count)]),
        noise_mask=torch.where(row % 7 == 3, 0, -1).to(torch.int32),
        top_k=torch.tensor([min(sizes[i % len(sizes)], vocab_size) for i in range(count)]),
        top_p=torch.tensor([_TOP_P[i % len(_TOP_P)] for i in range(count)], dtype=torch.float64),
        min_p_log2=torch.tensor([_MIN_P[i % len(_MIN_P)] for i in range(count)]),
    )
    x = row_logits(logits, vocab_size)
    row_max = torch.where(x > -torch.inf, x, -torch.inf).amax(-1)
    row_mass = exp2_mass(scaled_logits(x, row_max[:, None], rows.scale[:, None])).sum(-1)
    filters = (rows.scale, rows.top_k, rows.top_p)
    threshold = sorted_threshold(logits, *filters, vocab_size=vocab_size, base_is_row=False)
    keeps_all = (rows.top_k >= vocab_size) & (rows.top_p >= 1.0)
    threshold = torch.where(keeps_all, KEEP_ALL, threshold)
    races = (row % 5 != 4) & (row_max > -torch.inf)
    known = Threshold(threshold, races & ~keeps_all, races, row_mass)
    return logits, known, rows, row_max, threshold


def differing_rows(vocab_size: int, dtype: str, device: str, launch: str = "as always", shifted: int = 0) -> list[int]:
    """Rows where Triton's winner is not torch's, or that raced without need; masked winners have no token.

    Args:
        vocab_size: V.
        dtype: of the logits, by name.
        device: where Triton's race runs.
        launch: of ``LAUNCHES``.
        shifted: added to the keys of Triton's noise, by way of a control.
    """
    logits, known, rows, row_max, threshold = race_of_every_kind(vocab_size, dtype)
    static = {"vocab_size": vocab_size, "parts": 1}
    wanted = race_beyond(logits, known, rows, row_max, Found(threshold, None), **static)[:, 0]
    there = tree_map(lambda each: each.to(device), (logits, known, rows, row_max))
    search = importlib.import_module("compiled_sampler.wide_triton")
    with ExitStack() as changed:
        for name, value in LAUNCHES[launch].items():
            changed.enter_context(mock.patch.object(search, name, value))
        logits, known, rows, row_max = there
        parameters = (row_max, rows.scale, rows.top_k, rows.top_p, vocab_size, False)
        found, *lists = search.wide_search(logits, known.packed, known.pending, known.row_mass, *parameters)
    rows = rows._replace(keys=NoiseKeys(*(each + shifted for each in rows.keys)))
    differ = (found.cpu() != threshold) & known.pending.cpu()
    for parts in PARTS[:2] if device == "cpu" else PARTS:
        static = {"vocab_size": vocab_size, "parts": parts}
        won = race_beyond(logits, known, rows, row_max, Found(found, tuple(lists)), **static).amax(-1).cpu()
        differ |= torch.where((wanted >> 32) == MASKED_KEY, (won >> 32) != MASKED_KEY, won != wanted)
    return differ.nonzero().flatten().tolist()


def main() -> None:
    """Print, as JSON, the rows that differ in each case, and in the control."""
    differing = {f"{size} {dtype}": differing_rows(size, dtype, "cpu") for size, dtype in INTERPRETED}
    differing |= {launch: differing_rows(601, "float32", "cpu", launch) for launch in LAUNCHES}
    differing["control"] = differing_rows(129, "float32", "cpu", shifted=2)
    json.dump(differing, sys.stdout)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[int]]:
    """The rows that differ, by case, of the kernel in Triton's interpreter."""
    found: dict[str, list[int]] = run_interpreted(__file__)
    return found


@pytest.mark.parametrize(("vocab_size", "dtype"), INTERPRETED)
def test_the_interpreted_race_wins_what_torchs_does(interpreted, vocab_size, dtype):
    assert interpreted[f"{vocab_size} {dtype}"] == []


@pytest.mark.parametrize("launch", LAUNCHES)
def test_where_a_row_races_changes_nothing_interpreted(interpreted, launch):
    assert interpreted[launch] == []


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
def test_other_noise_has_other_winners_on_cuda():
    assert len(differing_rows(129, "float32", "cuda", shifted=2)) >= 10


if __name__ == "__main__":
    main()
