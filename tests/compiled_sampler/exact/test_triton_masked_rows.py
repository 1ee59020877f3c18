"""The masked copy of rows that race, in Triton, is torch's: interpreted on the CPU, compiled on CUDA.

This file also runs as a program, which prints what differs under the interpreter.
"""

import json
import sys
from unittest import mock

import pytest
import torch
from torch import Tensor

from compiled_sampler.edits.masks import MaskedLogits
from compiled_sampler.exact.row_race import masked_rows
from compiled_sampler.exact.triton import launches
from tests.builders_masks import MASKS, masked_inputs
from tests.interpreted import run_interpreted, with_less_overhead

SMALL = ((1, "float32"), (129, "float32"), (1000, "float16"))
NEVER = 77.0
"""What stands where nothing is written."""


def differing_rows(vocab_size: int, dtype: str, masks: str, device: str) -> list[int]:
    """Rows in which the kernel's copy is not torch's, or that it writes though they do not race."""
    inputs, _ = masked_inputs("no_filter", masks, vocab_size, getattr(torch, dtype))
    rows = MaskedLogits(inputs.logits, inputs.edits.token_bitmask, inputs.slots, inputs.edits.tables.allowed)
    races = torch.arange(len(inputs.slots)) % 5 != 2
    wanted = masked_rows(rows, races, vocab_size=vocab_size)
    wanted[~races] = NEVER
    made = torch.full_like(wanted, NEVER).to(device)
    words, of_slot = rows.token_bitmask, None if rows.allowed is None else rows.allowed.words
    given = (None if each is None else each.to(device) for each in (rows.logits, races, words, rows.slots, of_slot))
    launches.launch_masked_rows(*given, made)
    return [row for row, pair in enumerate(zip(made.cpu(), wanted, strict=True)) if not same_row(*pair)]


def same_row(left: Tensor, right: Tensor) -> bool:
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def cases() -> dict[str, tuple[int, str, str]]:
    """The small ones, by name."""
    return {f"{size} {dtype} {masks}": (size, dtype, masks) for size, dtype in SMALL for masks in MASKS}


def main() -> None:
    """Print, as JSON, the rows that differ in each case, in programs of few tokens and of few rows."""
    with mock.patch.multiple(launches, _MASKED_GROUP=4, _MASKED_TOKENS=64):
        json.dump({name: differing_rows(*case, "cpu") for name, case in cases().items()}, sys.stdout)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[int]]:
    """The rows that differ, by case, of the kernel in Triton's interpreter."""
    found: dict[str, list[int]] = run_interpreted(__file__)
    return found


@pytest.mark.parametrize("case", cases())
def test_the_interpreted_copy_is_torchs(interpreted, case):
    assert interpreted[case] == []


@pytest.mark.gpu
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("vocab_size", [1, 129, 20_000])
def test_the_compiled_copy_is_torchs(vocab_size, dtype, masks):
    assert differing_rows(vocab_size, dtype, masks, "cuda") == []


if __name__ == "__main__":
    with with_less_overhead():
        main()
