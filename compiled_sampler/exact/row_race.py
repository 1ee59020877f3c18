"""The race over whole rows, for rows whose filters may keep tokens beyond the candidates.

On a GPU the filters of most rows end within the candidates. These rows race among their candidates, and only the other
rows pay for a pass over all their tokens.

On the CPU, where such a pass costs less than selecting rows, every row races over all its tokens. The winner also wins
among the kept tokens if it is kept, that is, if the number and the mass of the tokens before it in the order are below
the limits of top-k and top-p. Only the other rows need their threshold for a draw; a law needs that of every row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import SampleOutputs
from compiled_sampler.core.filters import KEEP_ALL, mass_cut, ordered_logits, top_k_mass
from compiled_sampler.core.mass import exp2_mass, scaled_logits
from compiled_sampler.core.order import Last, indices, key_float, last_of, pack, packed_id, packed_key, reaches
from compiled_sampler.core.rows import RowParams, expand_to, take
from compiled_sampler.core.score import admitted_key
from compiled_sampler.core.stage import holds
from compiled_sampler.exact.threshold import (
    FlaggedRows,
    Threshold,
    base_is_row_mask,
    block_masses,
    keep_all_threshold,
    search_threshold,
    search_threshold_in_torch,
)
from compiled_sampler.exact.triton import triton_operator
from compiled_sampler.passes.blocks import AnyLogits, all_logits, logit_blocks, logits_of_rows, values_of, words_of
from compiled_sampler.passes.maxima import largest_key, nan_bits_of, row_nan_bits
from compiled_sampler.passes.race import tokens_from_packed


class MassBefore(NamedTuple):
    """The tokens that stand before a token in the order, counted and weighed by blocks."""

    counts: Tensor
    """int64 ``[R, B]``, the number of these tokens."""
    masses: Tensor
    """int64 ``[R, B]``, the mass of these tokens."""


def last_without_search(known: Threshold) -> Last:
    """The last token ``[R]`` that may be kept by what is known without a search; open rows keep all tokens."""
    return last_of(torch.where(known.is_open, KEEP_ALL, known.packed), by_key=True)


@holds(tokens=True)
def mass_before_winner(
    logits: Tensor, before: Last, row_max: Tensor, scale: Tensor, *, vocab_size: int, block: int
) -> MassBefore:
    """The number and the mass of the tokens that reach ``before``, int64 ``[R, B]`` each, by blocks."""
    x, ids = logit_blocks(logits, vocab_size, block)
    precedes = reaches(x, ids, Last(*(expand_to(field, x) for field in before)))
    mass = exp2_mass(scaled_logits(x, expand_to(row_max, x), expand_to(scale, x)))
    return MassBefore(precedes.sum(-1), torch.where(precedes, mass, 0).sum(-1))


def recheck_winners(
    ordered: Tensor | None,
    known: Threshold,
    before: MassBefore,
    rows: RowParams,
    *,
    vocab_size: int,
    base_is_row: bool,
) -> Threshold:
    """Thresholds ``[R]`` after a race up to ``last_without_search``; rows whose winner may be dropped stay open."""
    # Where the base of top-p is the mass after a top-k beyond the candidates, the mass of the candidates, which is
    # smaller, stands in for it.
    base = known.row_mass
    if ordered is not None:
        mass = top_k_mass(ordered, ordered_logits(ordered, rows.scale), rows.top_k).sum(-1)
        row_is_base = base_is_row_mask(rows.top_k, rows.top_p, vocab_size=vocab_size, base_is_row=base_is_row)
        base = torch.where(row_is_base, base, mass)
    kept = (before.counts.sum(-1) < rows.top_k) & (before.masses.sum(-1) < mass_cut(rows.top_p, base))
    packed = torch.where(known.is_open, KEEP_ALL, known.packed)
    return Threshold(packed, known.is_open & ~kept, known.beyond_candidates, known.row_mass)


NO_WINNER = KEEP_ALL
"""Stands for the winner of a row that did not race: the smallest int64, whose key is ``MASKED_KEY``."""


def race_rows(
    logits: AnyLogits,
    races: Tensor,
    rows: RowParams,
    row_max: Tensor | None,
    best_known: Tensor | None,
    *,
    vocab_size: int,
) -> Tensor:
    """The best packed (score key, id) in each part of the rows that race, int64 ``[R, n]``; ``NO_WINNER`` elsewhere."""
    # Of the filters only min_p is applied, which alone reads row_max. best_known: int64 [R], the packed (score key, id)
    # of a token of each row; a part in which no token has as good a score may name any of its tokens, or none.
    x, words = values_of(logits), words_of(logits, vocab_size)
    parameters = _parameters(rows, row_max)
    winners: Tensor = triton_operator("race_rows")(x, races, *parameters, best_known, words, vocab_size, False)[0]
    return winners


@holds(tokens=True)
def race_rows_in_torch(
    logits: AnyLogits,
    races: Tensor,
    rows: RowParams,
    row_max: Tensor | None,
    best_known: Tensor | None,
    *,
    vocab_size: int,
) -> Tensor:
    """``race_rows`` in torch: each row is one part."""
    return _raced(logits, races, rows, row_max, None, vocab_size)


def race_and_weigh(logits: AnyLogits, flagged: FlaggedRows, *, vocab_size: int, block: int) -> tuple[Tensor, Tensor]:
    """Parts of every row's mass, and ``race_rows`` of the rows that certainly race, in one pass over the logits."""
    # Returns masses, int64 [R, n], and winners, int64 [R, m].
    rows, row_max, races = flagged
    x, words = values_of(logits), words_of(logits, vocab_size)
    parameters = _parameters(rows, row_max)
    winners, masses = triton_operator("race_rows")(x, races, *parameters, None, words, vocab_size, True)
    return masses, winners


@holds(tokens=True)
def race_and_weigh_in_torch(
    logits: AnyLogits, flagged: FlaggedRows, *, vocab_size: int, block: int
) -> tuple[Tensor, Tensor]:
    """``race_and_weigh`` in torch: each row is one part, and races once its threshold is known."""
    rows, row_max, _ = flagged
    masses = block_masses(logits, row_max, rows.scale, vocab_size=vocab_size, block=block)
    return masses.sum(-1, keepdim=True), torch.full_like(rows.top_k, NO_WINNER)[:, None]


def _parameters(rows: RowParams, row_max: Tensor | None) -> tuple[Any, ...]:
    """The per-row arguments of the operator ``race_rows``."""
    largest = rows.scale if row_max is None else row_max  # a placeholder: without min_p the maximum is not read
    return largest, rows.scale, rows.top_k, rows.noise_mask, rows.min_p_log2, [*rows.keys]


def race_beyond_candidates(
    logits: AnyLogits,
    known: Threshold,
    rows: RowParams,
    row_max: Tensor,
    raced: Tensor,
    *,
    vocab_size: int,
    base_is_row: bool,
) -> Tensor:
    """The best packed (score key, id) of the rows that race, int64 ``[R, n]``; ``NO_WINNER`` elsewhere."""
    # The winner of a row is the largest of its n numbers; in rows that are searched all others are NO_WINNER.
    # raced, int64 [R, n], are the winners of rows that raced before.
    which = (known.packed, known.is_open, known.beyond_candidates, known.row_mass)
    parameters = (row_max, rows.scale, rows.top_k, rows.top_p, rows.noise_mask, rows.min_p_log2, [*rows.keys])
    winners: Tensor = triton_operator("race_beyond_candidates")(
        values_of(logits), *which, *parameters, raced, words_of(logits, vocab_size), vocab_size, base_is_row
    )
    return winners


@holds(tokens=True)
def race_beyond_candidates_in_torch(
    logits: AnyLogits,
    known: Threshold,
    rows: RowParams,
    row_max: Tensor,
    raced: Tensor,
    *,
    vocab_size: int,
    base_is_row: bool,
) -> Tensor:
    """``race_beyond_candidates`` in torch, which does not read who raced."""
    x = all_logits(logits, vocab_size)
    threshold = search_threshold_in_torch(x, known, row_max, rows, vocab_size=vocab_size, base_is_row=base_is_row)
    return _raced(x, known.beyond_candidates, rows, row_max, threshold, vocab_size)


def _raced(
    logits: AnyLogits, races: Tensor, rows: RowParams, row_max: Tensor | None, threshold: Tensor | None, vocab_size: int
) -> Tensor:
    """The winners of the rows that race, int64 ``[R, 1]``, in torch; ``NO_WINNER`` for other rows."""
    index = races.nonzero().flatten()
    x, ids = logits_of_rows(logits, index, vocab_size), indices(vocab_size, index.device)
    last = None if threshold is None else last_of(threshold[index], by_key=True)
    largest = None if row_max is None else row_max[index]
    key = admitted_key(x, ids, take(rows, index), largest, last, by_key=True)
    unraced = torch.full_like(rows.top_k, NO_WINNER)
    return unraced.index_copy(0, index, pack(key, ids).amax(-1))[:, None]


def race_top_k(logits: AnyLogits, rows: RowParams, *, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The best packed (score key, id) of each row under top-k and min_p, and its ``nan_bits``: ``[R, 1]`` each."""
    # A row is read at most twice: by the search, which needs no pass before it, and by the race of rows that keep many
    # tokens.
    # Requires top_p = 1 in each row: no mass is computed.
    x, words = values_of(logits), words_of(logits, vocab_size)
    parameters = (rows.live, rows.scale, rows.top_k, rows.top_p, rows.noise_mask, rows.min_p_log2, [*rows.keys])
    winners, nan_bits = triton_operator("race_top_k")(x, *parameters, words, vocab_size)
    return winners, nan_bits


@holds(tokens=True)
def race_top_k_in_torch(logits: AnyLogits, rows: RowParams, *, vocab_size: int) -> tuple[Tensor, Tensor]:
    """``race_top_k`` in torch."""
    x = all_logits(logits, vocab_size)
    known = keep_all_threshold(rows, rows.live & (rows.top_k < vocab_size), rows.live)
    row_max = key_float(largest_key(x))
    threshold = search_threshold_in_torch(x, known, row_max, rows, vocab_size=vocab_size, base_is_row=False)
    return _raced(x, known.beyond_candidates, rows, row_max, threshold, vocab_size), nan_bits_of(x)[:, None]


IN_TORCH: dict[Callable[..., Any], Callable[..., Any]] = {
    race_and_weigh: race_and_weigh_in_torch,
    race_beyond_candidates: race_beyond_candidates_in_torch,
    race_rows: race_rows_in_torch,
    race_top_k: race_top_k_in_torch,
    search_threshold: search_threshold_in_torch,
}
"""Stages that only launch hand-written kernels, so that a GPU's schedules alone have them; and torch in their place."""


def draw_from_winners(winners: Tensor, nan_bits: Tensor, idle: Tensor) -> SampleOutputs:
    """Tokens and status ``[R]`` from the winners of races, int64 ``[R, 1]``, and ``nan_bits``, int32 ``[R, 1]``."""
    return tokens_from_packed(winners[:, 0], nan_bits[:, 0], idle)


def draw_from_candidates_and_winners(
    ordered: Tensor, winners: Tensor, nan_bits: Tensor, rows: RowParams, row_max: Tensor, known: Threshold
) -> SampleOutputs:
    """Tokens and status ``[R]``: the winner among the kept candidates or, in rows that raced, that race's winner."""
    # winners: int64 [R, n], n at most C.
    ids = packed_id(ordered).to(torch.int32)
    key = admitted_key(key_float(packed_key(ordered)), ids, rows, row_max, last_of(known.packed, by_key=False))
    raced = F.pad(winners, (0, ordered.shape[1] - winners.shape[1]), value=NO_WINNER)
    best = torch.where(known.beyond_candidates[:, None], raced, pack(key, ids)).amax(-1)
    return tokens_from_packed(best, row_nan_bits(nan_bits, ordered.shape[1]), rows.idle)
