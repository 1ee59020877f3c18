"""The race of rows whose filters may keep tokens beyond the candidates, on a GPU.

Most rows end among the candidates: they race there, and the pass over the row is left to the others. On the CPU, where
a pass costs less than the choice, ``drawing.py`` lets every row race over all its tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import Rows, SampleOutputs
from compiled_sampler.blocks import largest_key, nan_bits
from compiled_sampler.draw import admitted_key, outputs
from compiled_sampler.filters import KEEP_ALL
from compiled_sampler.order import indices, key_float, last_of, pack, packed_id, packed_key, row_logits
from compiled_sampler.rows import take
from compiled_sampler.wide import Threshold, Weighed, keeping_all, triton_operator, wide_threshold

NO_WINNER = KEEP_ALL
"""Stands for the winner of a row that did not race: the smallest packed number, whose key is ``MASKED_KEY``."""


def race_outgrown(logits: Tensor, weighed: Weighed, *, vocab_size: int) -> Tensor:
    """``race_beyond`` of rows that are sure to race, before their candidates are known; int64 ``[R, n]``.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        weighed: ``[R]``.
        vocab_size: V.
    """
    if logits.is_cuda:
        return _race_of(logits, weighed.outgrown, weighed.rows, weighed.row_max, vocab_size)
    return torch.full_like(weighed.row_mass, NO_WINNER)[:, None]


def race_beyond(
    logits: Tensor,
    known: Threshold,
    rows: Rows,
    row_max: Tensor,
    raced: Tensor | None,
    *,
    vocab_size: int,
    base_is_row: bool,
) -> Tensor:
    """The best packed (score key, id) of rows that race, ``NO_WINNER`` for the others; int64 ``[R, n]``.

    The largest of a row is its winner. Where rows are searched it is the only one.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        known: what is known of the threshold, and which rows race.
        rows: per-row parameters ``[R]``.
        row_max: float32 ``[R]``, the largest logit.
        raced: int64 ``[R, n]``, from ``race_outgrown``; on CUDA None where no row is pending, and all that race keep
            every token that min_p keeps. Elsewhere it is not read.
        vocab_size: V.
        base_is_row: as ``wide.known_threshold``.
    """
    if logits.is_cuda:
        if raced is None:
            return _race_of(logits, known.beyond, rows, row_max, vocab_size)
        which = (known.packed, known.pending, known.beyond, known.row_mass)
        parameters = (row_max, rows.scale, rows.top_k, rows.top_p, rows.noise_mask, rows.min_p_log2, [*rows.keys])
        winners: Tensor = triton_operator("wide_draw")(logits, *which, *parameters, raced, vocab_size, base_is_row)
        return winners
    threshold = wide_threshold(logits, known, row_max, rows, vocab_size=vocab_size, base_is_row=base_is_row)
    index = known.beyond.nonzero().flatten()
    x, ids = row_logits(logits[index], vocab_size), indices(vocab_size, logits.device)
    key = admitted_key(x, ids, take(rows, index), row_max[index], last_of(threshold[index]))
    return torch.full_like(threshold, NO_WINNER).index_copy(0, index, pack(key, ids).amax(-1))[:, None]


def _race_of(logits: Tensor, races: Tensor, rows: Rows, row_max: Tensor, vocab_size: int) -> Tensor:
    """The winners of parts of the rows that race, on CUDA; ``races`` bool ``[R]``, the others as ``race_beyond``."""
    parameters = (row_max, rows.scale, rows.top_k, rows.noise_mask, rows.min_p_log2, [*rows.keys])
    winners: Tensor = triton_operator("wide_race")(logits, races, *parameters, vocab_size)
    return winners


def race_top_k(logits: Tensor, rows: Rows, *, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The best packed (score key, id) of each row under top-k and min_p, and its ``nan_bits``: ``[R, 1]`` each.

    On a GPU a row is read twice at most: by the search, which needs no pass before it, and by the race of rows that
    keep many tokens.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        rows: per-row parameters ``[R]``; top-p keeps all tokens of each.
        vocab_size: V.

    Returns:
        int64 and int32.
    """
    if logits.is_cuda:
        parameters = (rows.live, rows.scale, rows.top_k, rows.top_p, rows.noise_mask, rows.min_p_log2, [*rows.keys])
        winners, magnitudes = triton_operator("wide_top_k")(logits, *parameters, vocab_size)
        return winners, magnitudes
    x = row_logits(logits, vocab_size)
    known = keeping_all(rows, rows.live & (rows.top_k < vocab_size), rows.live)
    row_max = key_float(largest_key(x))
    winners = race_beyond(logits, known, rows, row_max, None, vocab_size=vocab_size, base_is_row=False)
    return winners, nan_bits(x)[:, None]


def draw_raced(winners: Tensor, magnitudes: Tensor, live: Tensor) -> SampleOutputs:
    """The winners of races and ``nan_bits``, ``[R, 1]`` each, as tokens."""
    return outputs(winners[:, 0], magnitudes[:, 0], live)


def draw_from_all(
    ordered: Tensor, winners: Tensor, magnitude: Tensor, rows: Rows, row_max: Tensor, known: Threshold
) -> SampleOutputs:
    """The winner among the candidates that the filters keep, or, in rows that raced beyond them, the winner there.

    Args:
        ordered: int64 ``[R, C]``, packed (order key, id) of the first C tokens in descending order.
        winners: int64 ``[R, n]``, from ``race_beyond``, at most C of a row.
        magnitude: int32 ``[R]``, its ``nan_bits``.
        rows: per-row parameters ``[R]``.
        row_max: float32 ``[R]``.
        known: the threshold where rows did not race.
    """
    ids = packed_id(ordered).to(torch.int32)
    key = admitted_key(key_float(packed_key(ordered)), ids, rows, row_max, last_of(known.packed))
    raced = F.pad(winners, (0, ordered.shape[1] - winners.shape[1]), value=NO_WINNER)
    return outputs(torch.where(known.beyond[:, None], raced, pack(key, ids)).amax(-1), magnitude, rows.live)
