"""Rows that race under filters, and those where the kernels' winner is not that of torch."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from compiled_sampler.core.filters import KEEP_ALL
from compiled_sampler.core.mass import exp2_mass, scaled_logits
from compiled_sampler.core.noise import NoiseKeys, noise_keys
from compiled_sampler.core.order import MASKED_KEY, POSITIVE_INFINITY_KEY, row_logits
from compiled_sampler.core.rows import RowParams
from compiled_sampler.exact import triton as triton_launches
from compiled_sampler.exact.row_race import NO_WINNER, race_beyond_candidates_in_torch, race_top_k_in_torch
from compiled_sampler.exact.threshold import Threshold
from tests.cases.hard_rows import KINDS

LAUNCHES: dict[str, dict[str, Any]] = {
    "as always": {},
    "lists of all that is kept": {"_FEW": 2**30},
    "no lists": {"_FEW": -1},
    "proofs by up to nine samples": {"_SAMPLE": 64, "_SAMPLES": 9},
    "no proofs": {"_SAMPLES": 0},
    "every row races first": {"_LISTED_TOP_K": 0, "_FEW": -1},
    "few rows race first": {"_LISTED_TOP_K": 2**30},
    "rows in two parts": {"_RACING": 2 * len(KINDS), "_PARTS": (2, 1), "_RACE_DEPTH": 2},
    "four rows a program": {"FEW_ROWS": 0},
    "rows in parts of a tile": {"_PARTS": (256,), "_RACE_DEPTH": 1},
    "three programs measure": {"_PROGRAMS": 3, "_PROGRAMS_OF_K": 3},
    "short lists": {"_FEW": 2**30, "_CAPACITY": 24},
    "brackets that miss": {"_FEW": 2**30, "_DEVIATIONS": -9.0},
}
"""Constants that decide where a row races, and whether it is searched."""

FILTERED_BY_MIN_P = ("min_p", "min_p and masks")
FILTERED_BY_TOP_K = ("top_k", "top_k and masks")

_SCALES = (1.442695, 0.1, 144269.5, 1.4e-30)
_MIN_P = (-torch.inf, -10.0, -0.5, -torch.inf, 0.0)
_TOP_P = (1.0, 0.5, 1.0, 0.9, 0.999, 1.0, 1e-9)


class Race(NamedTuple):
    """Rows that race: logits with columns beyond V, and the other arguments of ``race_beyond_candidates``."""

    logits: Tensor
    known: Threshold
    rows: RowParams
    row_max: Tensor


def poisoned_rows(vocab_size: int, dtype: str) -> Tensor:
    """A row of each of ``KINDS``, with columns of +inf beyond V."""
    noise = torch.randn(len(KINDS), vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits = torch.full((len(KINDS), vocab_size + 3), torch.inf).to(getattr(torch, dtype))
    for row, kind in enumerate(KINDS):
        logits[row, :vocab_size] = kind(noise[row : row + 1])[0]
    return logits


def row_params(count: int, vocab_size: int, **given: Any) -> RowParams:
    """Rows with noise of their own that draw from all tokens, but for what is given."""
    row = torch.arange(count)
    usual = RowParams(
        live=row >= 0,
        idle=torch.zeros(count, dtype=torch.int32),
        keys=noise_keys(row * 12345678901, row + 2**40, 0),
        scale=torch.full((count,), 1.25),
        noise_mask=torch.full((count,), -1, dtype=torch.int32),
        top_k=torch.full((count,), vocab_size),
        top_p=torch.ones(count, dtype=torch.float64),
        min_p_log2=torch.full((count,), -torch.inf),
    )
    return usual._replace(**given)


def race_of_every_kind(vocab_size: int, dtype: str) -> Race:
    """Rows of every kind under filters of many kinds, with poisoned columns beyond V.

    Rows race that have to be searched, and some that keep all tokens; of both some do not.
    """
    count, logits = len(KINDS), poisoned_rows(vocab_size, dtype)
    if dtype == "bfloat16":
        logits[logits.abs() < 2.0**-126] = 0.0  # the interpreter misreads bfloat16 denormals
    row = torch.arange(count)
    sizes = (vocab_size, 3, vocab_size // 2 + 1, vocab_size, max(1, vocab_size // 50))
    rows = row_params(
        count,
        vocab_size,
        scale=torch.tensor([1.0 if i % 7 == 3 else _SCALES[i % len(_SCALES)] for i in range(count)]),  # 1: greedy
        noise_mask=torch.where(row % 7 == 3, 0, -1).to(torch.int32),
        top_k=torch.tensor([min(sizes[i % len(sizes)], vocab_size) for i in range(count)]),
        top_p=torch.tensor([_TOP_P[i % len(_TOP_P)] for i in range(count)], dtype=torch.float64),
        min_p_log2=torch.tensor([_MIN_P[i % len(_MIN_P)] for i in range(count)]),
    )
    return race_of(logits, rows, vocab_size, row % 5 != 4)


def race_of_flat_rows(vocab_size: int, count: int) -> Race:
    """Rows that only top-p filters, whose winners it often drops: whether it does has to be proven or found."""
    noise = torch.randn(count, vocab_size + 1, generator=torch.Generator().manual_seed(count))
    row, top_p = torch.arange(count), torch.linspace(0.2, 0.999, count, dtype=torch.float64)
    rows = row_params(count, vocab_size, keys=noise_keys(row + 2**50, row * 3, 0), top_p=top_p)
    return race_of(0.01 * noise, rows, vocab_size, rows.live)


def race_of_masked_rows(vocab_size: int, count: int) -> Race:
    """Rows of which a mask leaves up to a hundred tokens, half of them under a top-k that asks for more."""
    flat = race_of_flat_rows(vocab_size, count)
    row = torch.arange(count)
    visible = torch.rand(count, vocab_size + 1, generator=torch.Generator().manual_seed(1)).argsort(-1) < row[:, None]
    top_k = torch.where(row % 2 == 0, vocab_size // 2, vocab_size)
    rows = flat.rows._replace(top_k=top_k, top_p=torch.where(row % 2 == 0, 1.0, flat.rows.top_p))
    return race_of(torch.where(visible, 100.0 * flat.logits, -torch.inf), rows, vocab_size, row >= 0)


def race_of_prefixes(vocab_size: int, count: int) -> Race:
    """Rows whose top-p is a share of what a top-k below V keeps: that mass has to be summed."""
    flat, row = race_of_flat_rows(vocab_size, count), torch.arange(count)
    top_p = torch.linspace(0.05, 0.95, count, dtype=torch.float64)
    rows = flat.rows._replace(top_k=70 + row * (vocab_size // 3) // count, top_p=top_p)
    return race_of(30.0 * flat.logits, rows, vocab_size, row >= 0)


def race_of(logits: Tensor, rows: RowParams, vocab_size: int, races: Tensor) -> Race:
    """The race of such rows, of those that ``races`` names."""
    x = row_logits(logits, vocab_size)
    row_max = torch.where(x > -torch.inf, x, -torch.inf).amax(-1)
    row_mass = exp2_mass(scaled_logits(x, row_max[:, None], rows.scale[:, None])).sum(-1)
    keeps_all = (rows.top_k >= vocab_size) & (rows.top_p >= 1.0)
    races = races & (row_max > -torch.inf)
    packed = torch.where(keeps_all, KEEP_ALL, 0)  # of open rows it says nothing
    return Race(logits, Threshold(packed, races & ~keeps_all, races, row_mass), rows, row_max)


def masked_at_random(logits: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Words with a bit for each token, half of them 0, int32 ``[R, > ceil(V / 32)]``, and the logits they leave."""
    shape, generator = (len(logits), vocab_size // 32 + 3), torch.Generator().manual_seed(vocab_size)
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)
    ids = torch.arange(vocab_size)
    return words, torch.where(words[:, ids // 32] >> (ids % 32) & 1 > 0, logits[:, :vocab_size], -torch.inf)


def won_in_full(race: Race, words: Tensor | None, vocab_size: int, first: Tensor) -> tuple[Tensor, Tensor]:
    """Winners ``[R, 1]`` and part masses ``[R, n]`` by the kernels of mode ``full``; rows ``first`` race as weighed."""
    logits, known, rows, row_max = race
    operators = importlib.import_module("compiled_sampler.exact.triton.operators")
    noise = (rows.noise_mask, rows.min_p_log2, [*rows.keys])
    of_row = (row_max, rows.scale, rows.top_k)
    raced, masses = operators.race_rows(logits, first, *of_row, *noise, None, words, vocab_size, True)
    which = (known.packed, known.is_open, known.beyond_candidates, known.row_mass)
    winners: Tensor = operators.race_beyond_candidates(
        logits, *which, *of_row, rows.top_p, *noise, raced, words, vocab_size, False
    )
    return winners, masses


def won_by_others(
    race: Race, vocab_size: int, device: str, launch: str, shifted: int = 0, filters: str = "all"
) -> list[int]:
    """Rows where Triton's winner is not torch's, or that raced without need; masked winners have no token.

    Of rows that only top-p filters two thirds race first, the others with those that top-k filters. The filters are
    "all"; "min_p", so that nothing is searched; "top_k" and min_p, so that no pass comes before; "and masks" with each.
    ``shifted`` is added to the keys of Triton's noise, by way of a control.
    """
    logits, known, rows, row_max = race
    words, masked = None, logits
    if filters.endswith("and masks"):
        words, masked = masked_at_random(logits, vocab_size)
    if filters == "all and masks":
        _, known, rows, row_max = race_of(masked, rows, vocab_size, known.beyond_candidates)
    if filters in FILTERED_BY_MIN_P:
        known = known._replace(packed=torch.full_like(known.packed, KEEP_ALL), is_open=known.is_open & False)
    if filters in FILTERED_BY_TOP_K:
        rows = rows._replace(top_p=torch.ones_like(rows.top_p), live=known.beyond_candidates)
        wanted, nan_bits = race_top_k_in_torch(masked, rows, vocab_size=vocab_size)
    else:
        raced = torch.empty(0)  # is not read here
        base = {"vocab_size": vocab_size, "base_is_row": False}
        wanted = race_beyond_candidates_in_torch(masked, known, rows, row_max, raced, **base)
    given = logits, known, rows, row_max, words
    logits, known, rows, row_max, words = tree_map(lambda each: None if each is None else each.to(device), given)
    rows = rows._replace(keys=NoiseKeys(*(each + shifted for each in rows.keys)))
    noise = (rows.noise_mask, rows.min_p_log2, [*rows.keys])
    operators = importlib.import_module("compiled_sampler.exact.triton.operators")
    differ = torch.zeros(wanted.shape[0], dtype=torch.bool)
    constants = LAUNCHES[launch]
    with mock.patch.dict(vars(operators), constants), mock.patch.dict(vars(triton_launches), constants):
        if filters.startswith("all"):
            is_first = torch.arange(len(row_max), device=device) % 3 > 0
            first = known.beyond_candidates & (rows.top_k >= vocab_size) & is_first
            winners, masses = won_in_full(Race(logits, known, rows, row_max), words, vocab_size, first)
            differ |= ((masses.sum(-1) != known.row_mass) & rows.live).cpu()
        elif filters in FILTERED_BY_MIN_P:
            known_winner = torch.arange(len(row_max)) % 2 > 0
            found = torch.where(known_winner, wanted[:, 0], NO_WINNER).to(device)
            of_race = (row_max, rows.scale, rows.top_k, *noise)
            winners, _ = operators.race_rows(logits, known.beyond_candidates, *of_race, found, words, vocab_size, False)
        else:
            parameters = (rows.live, rows.scale, rows.top_k, rows.top_p)
            winners, seen = operators.race_top_k(logits, *parameters, *noise, words, vocab_size)
            has_nan = nan_bits > POSITIVE_INFINITY_KEY
            differ |= ((seen.cpu() > POSITIVE_INFINITY_KEY) != has_nan)[:, 0] & rows.live.cpu()
    won, best = winners.amax(-1).cpu(), wanted[:, 0]
    differ |= torch.where((best >> 32) == MASKED_KEY, (won >> 32) != MASKED_KEY, won != best)
    return differ.nonzero().flatten().tolist()


@contextmanager
def kept_searches(**constants: float) -> Iterator[list[Any]]:
    """The ``launches.Search`` of each search within, which is launched with these constants of ``launches``."""
    operators = importlib.import_module("compiled_sampler.exact.triton.operators")
    launches = importlib.import_module("compiled_sampler.exact.triton.operators")
    searches, empty = list[Any](), launches.empty_search

    def kept(*given: Any) -> Any:
        searches.append(empty(*given))
        return searches[-1]

    with mock.patch.object(operators, "empty_search", kept), mock.patch.dict(vars(launches), constants):
        yield searches
