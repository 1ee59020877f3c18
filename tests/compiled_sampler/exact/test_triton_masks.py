"""The searches and races of the modes ``top_k`` and ``full`` read masks beside the logits, as they read a masked copy.

This file also runs as a program, which prints what differs under the interpreter.
"""

import importlib
import itertools
import json
import sys

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler.core.noise import noise_keys
from compiled_sampler.core.order import MASKED_KEY, POSITIVE_INFINITY_KEY
from compiled_sampler.core.rows import RowParams
from compiled_sampler.exact.row_race import race_top_k
from tests.builders.races import masked_at_random, race_of, race_of_flat_rows, won_in_full
from tests.builders.searches import kept_searches
from tests.interpreted import run_interpreted, with_less_overhead

KINDS = ("nothing", "one token", "the last token", "nothing below V", "ten tokens", "half", "all but one", "all")
SIZES, DTYPES = (1, 2, 127, 129, 1025), ("float32", "bfloat16", "float16")
SAMPLE = 256
"""Tokens of a small sample: Triton 3.6 compiles none of fewer tokens than threads where masks are read."""
LAUNCHES: dict[str, dict[str, float]] = {
    "as always": {},
    "small samples": {"_SAMPLE": SAMPLE, "_FEW": 16},
    "short lists, brackets that miss": {"_SAMPLE": SAMPLE, "_CAPACITY": 16, "_DEVIATIONS": -9.0},
    "every row races first": {"_RACED": 0, "_FEW": -1},
}
COMPARED = {"brackets": (0, 1, 4, 5), "sums": (0, 1, 5)}
"""Fields of a search that mode ``top_k`` writes for every row that it searches."""
UNDER_TOP_P = {"brackets": (2, 3, 4, 5, 6), "sums": (3, 4, 5, 6)}
"""The same of a search for the threshold of top-p alone."""


def visible_tokens(vocab_size: int, generator: torch.Generator) -> Tensor:
    """Which tokens the masks of the kinds leave, bool ``[R, 32 * W]``; of the kinds three rows each."""
    width = -(-vocab_size // 32) * 32
    chosen = torch.rand(3 * len(KINDS), width, generator=generator)
    for row, kind in enumerate(KINDS * 3):
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


def differing(
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
    rows = RowParams(
        live=row % 9 != 8,
        idle=torch.where(row % 9 != 8, 0, -1).to(torch.int32),
        keys=noise_keys(row * 12345678901, row + 2**40, 0),
        scale=torch.full((count,), 1.4),
        noise_mask=torch.full((count,), -1, dtype=torch.int32),
        top_k=top_k,
        top_p=torch.ones(count, dtype=torch.float64),
        min_p_log2=torch.where(row % 4 == 3, -3.0, -torch.inf),
    )
    wanted, nan_bits = race_top_k(masked, rows, vocab_size=vocab_size)
    words = packed(visible.roll(1, 0) if is_control else visible)
    won, seen_nan, search = raced(logits, words, rows, vocab_size, launch, device)
    _, _, of_copy = raced(masked, None, rows, vocab_size, launch, device)
    best, is_live = wanted[:, 0], rows.live
    found = {"winners": torch.where((best >> 32) == MASKED_KEY, (won >> 32) != MASKED_KEY, won != best)}
    found["nan"] = (seen_nan > POSITIVE_INFINITY_KEY) != (nan_bits[:, 0] > POSITIVE_INFINITY_KEY)
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
    with kept_searches(**LAUNCHES[launch]) as kept:
        winners, nan_bits = operators.race_top_k(*given[0], given[1], masks, vocab_size)
    search = {name: getattr(kept[0], name).cpu() for name in COMPARED}
    return winners[:, 0].cpu(), nan_bits[:, 0].cpu(), search


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


def main() -> None:
    """Print, as JSON, what differs in each case, and in the control."""
    is_full = "--full" in sys.argv
    cases = itertools.chain(
        ((size, "float32", "small samples") for size in SIZES),
        ((129, dtype, "as always") for dtype in DTYPES),
        ((1025, dtype, launch) for dtype, launch in itertools.product(DTYPES[1:], LAUNCHES)),
    )
    if not is_full:
        cases = itertools.chain([(129, "bfloat16", "as always"), (1025, "float16", "short lists, brackets that miss")])
    found = {f"{size} {dtype}, {launch}": differing(size, dtype, launch, "cpu") for size, dtype, launch in cases}
    sizes = SIZES[1:] if is_full else (129,)
    found |= {f"{size} under top-p": differing_under_top_p(size, "cpu") for size in sizes}
    found["control"] = differing(1025, "float32", "small samples", "cpu", is_control=True)
    found["control under top-p"] = differing_under_top_p(1025, "cpu", is_control=True)
    json.dump(found, sys.stdout)


@pytest.mark.parametrize(
    ("arguments", "num_cases"), [([], 3), pytest.param(["--full"], 20, marks=pytest.mark.full)], ids=["few", "all"]
)
def test_masks_beside_the_logits_are_a_masked_copy_interpreted(arguments, num_cases):
    found = run_interpreted(__file__, *arguments)
    controls = [found.pop(name) for name in ("control", "control under top-p")]
    assert len(found) == num_cases
    assert {case: each for case, each in found.items() if any(each.values())} == {}
    assert all(len(control[name]) >= 5 for control in controls for name in ("winners", "brackets", "sums"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_masks_beside_the_logits_are_a_masked_copy(launch, dtype):
    for vocab_size in (*SIZES, 151_936):
        assert not any(differing(vocab_size, dtype, launch, "cuda").values()), vocab_size


@pytest.mark.gpu
def test_masks_beside_the_logits_are_a_masked_copy_under_top_p():
    for vocab_size in (*SIZES[1:], 151_936):
        assert not any(differing_under_top_p(vocab_size, "cuda").values()), vocab_size


if __name__ == "__main__":
    with with_less_overhead():
        main()
