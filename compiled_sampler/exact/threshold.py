"""The exact top-k and top-p threshold of a row of any width, for rows whose filters keep more than the candidates.

By definition: sort the whole row, apply the filters, name the last token kept (``core/reference.py``). In torch the
same filters are applied to the first 4,096 tokens of the order, and to all where that is not enough; most draws on the
CPU skip this search (``row_race.py``). On CUDA ``exact/triton`` finds the same threshold by a search that reads a row
about once and skips rows that need none; torch searches there until these kernels are compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.core.filters import (
    KEEP_ALL,
    keep_min_p,
    keep_prefix,
    last_kept,
    mass_cut,
    ordered_logits,
    top_k_mass,
)
from compiled_sampler.core.mass import MASS_BITS, exp2_mass, scaled_logits
from compiled_sampler.core.order import key_float, order_key, pack, packed_id, packed_key, row_logits
from compiled_sampler.core.rows import RowParams, RowSlots, gather_rows
from compiled_sampler.core.stage import holds
from compiled_sampler.exact.triton import triton_operator
from compiled_sampler.passes.blocks import AnyLogits, all_logits, in_blocks
from compiled_sampler.passes.candidates import largest, number
from compiled_sampler.passes.maxima import kept_in_kernel, largest_of_live, rows_of_blocks

_ENOUGH = 4096  # tokens within which most filters end; for the other rows all tokens are sorted


class FlaggedRows(NamedTuple):
    """Parameters of rows, their largest logits, and which of them block maxima alone show to exceed the candidates."""

    rows: RowParams
    """Parameters ``[R]``."""
    row_max: Tensor
    """float32 ``[R]``, the largest logit."""
    races: Tensor
    """bool ``[R]``, true for rows that certainly race over all their tokens: only top-p filters them, if anything, and
    certainly keeps more tokens than the candidates."""


class Threshold(NamedTuple):
    """The last token that top-k and top-p keep, in rows where it is known."""

    packed: Tensor
    """int64 ``[R]``, the packed (order key, id) of that token."""
    is_open: Tensor
    """bool ``[R]``, true if it is not known yet: a draw or a search has to close the row."""
    beyond_candidates: Tensor
    """bool ``[R]``, true if tokens beyond the first C of the order may be kept."""
    row_mass: Tensor
    """int64 ``[R]``, the mass of the row."""


@holds(tokens=True)
def block_masses(logits: AnyLogits, row_max: Tensor, scale: Tensor, *, vocab_size: int, block: int) -> Tensor:
    """The mass of each block of a row: int64 ``[R, ceil(V / block)]``."""
    x = in_blocks(all_logits(logits, vocab_size), block, float("-inf"))
    return exp2_mass(scaled_logits(x, row_max[:, None, None], scale[:, None, None])).sum(-1)


def threshold_in_prefix(
    ordered: Tensor,
    scale: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    row_mass: Tensor,
    *,
    vocab_size: int,
    base_is_row: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The last of the first C tokens that top-k and top-p keep, int64 ``[R]`` packed, and two flags."""
    # The flags, bool [R] each, say that the base of top-p is known, without which the key means nothing, and that no
    # token beyond the first C is kept.
    mass = top_k_mass(ordered, ordered_logits(ordered, scale), top_k)
    fits = top_k <= ordered.shape[1]
    base = row_mass if base_is_row else torch.where(fits, mass.sum(-1), row_mass)
    base_known = fits | base_is_row_mask(top_k, top_p, vocab_size=vocab_size, base_is_row=base_is_row)
    keep = keep_prefix(ordered, mass, top_k, top_p, base)
    return last_kept(ordered, keep), base_known, fits | ~keep.all(-1)  # a prefix: all true if the last is


def base_is_row_mask(top_k: Tensor, top_p: Tensor, *, vocab_size: int, base_is_row: bool) -> Tensor:
    """Mask of the rows in which the base of top-p is the row's mass, or top-p keeps all tokens: bool ``[R]``."""
    # Arguments as threshold_in_prefix.
    return (top_k >= vocab_size) | (top_p >= 1.0) | base_is_row


def flag_exceeding_rows(
    keys: Tensor, row_slots: RowSlots, *, vocab_size: int, capacity: int, stream: int
) -> FlaggedRows:
    """Parameters and largest logit of each row, and the rows that certainly keep more tokens than the candidates."""
    # A block weighs at least as much as its first token, and no token weighs more than 2**MASS_BITS: if the cut of
    # top-p on the sum of these lower bounds exceeds C times that weight, C tokens cannot reach it.
    rows = gather_rows(row_slots, stream=stream)
    # rows.live, which is read last, and not the slots: a kernel that ends sooner lets the race of 32 rows take all
    # multiprocessors before the candidates' second level, 63 us instead of 57 in a process of few streams on an H200
    row_max = largest_of_live(keys, rows.live)
    least = exp2_mass(scaled_logits(key_float(keys), row_max[:, None], rows.scale[:, None])).sum(-1)
    alone = rows.live & (rows.top_k >= max(vocab_size, capacity + 1)) & (rows.min_p_log2 == float("-inf"))
    return FlaggedRows(rows, row_max, alone & (mass_cut(rows.top_p, least) > capacity << MASS_BITS))


def row_masses(masses: Tensor) -> Tensor:
    """The mass of each row, int64 ``[R]``, from the masses of its parts ``[R, n]``."""
    return masses.sum(-1)


def threshold_from_candidates(
    ordered: Tensor, rows: RowParams, row_mass: Tensor, *, vocab_size: int, base_is_row: bool
) -> Threshold:
    """The threshold of each row ``[R]``, known where the filters end within the first C tokens."""
    parameters = (rows.scale, rows.top_k, rows.top_p, row_mass)
    last, base_known, ends = threshold_in_prefix(ordered, *parameters, vocab_size=vocab_size, base_is_row=base_is_row)
    ends = ends | ~keep_min_p(ordered_logits(ordered, rows.scale), rows.min_p_log2).all(-1)
    keeps_all = (rows.top_k >= vocab_size) & (rows.top_p >= 1.0)
    beyond_candidates = ~(base_known & ends) & rows.live
    return Threshold(
        torch.where(keeps_all, KEEP_ALL, last), beyond_candidates & ~keeps_all, beyond_candidates, row_mass
    )


def threshold_without_candidates(
    keys: Tensor, row_slots: RowSlots, *, vocab_size: int, stream: int
) -> tuple[RowParams, Tensor, Threshold]:
    """Parameters, largest logits and thresholds ``[R]`` without candidates: rows with top_k < V need a search."""
    rows, row_max = rows_of_blocks(keys, row_slots, stream=stream)
    return rows, row_max, keep_all_threshold(rows, rows.live & (rows.top_k < vocab_size), rows.live)


def keep_all_threshold(rows: RowParams, is_open: Tensor, beyond_candidates: Tensor) -> Threshold:
    """Thresholds ``[R]`` that every token reaches until the open ones are searched, which does not read the mass."""
    return Threshold(
        kept_in_kernel(rows.live, KEEP_ALL, 0), is_open, beyond_candidates, kept_in_kernel(rows.live, 1, 0)
    )


def search_threshold(
    logits: Tensor, known: Threshold, row_max: Tensor, rows: RowParams, *, vocab_size: int, base_is_row: bool
) -> Tensor:
    """The threshold of every row, int64 ``[R]`` packed (order key, id), with the open rows searched."""
    arguments = (logits, known.packed, known.is_open, known.row_mass, row_max, rows.scale, rows.top_k, rows.top_p)
    threshold: Tensor = triton_operator("search_threshold")(*arguments, vocab_size, base_is_row)
    return threshold


@holds(tokens=True)
def search_threshold_in_torch(
    logits: Tensor, known: Threshold, row_max: Tensor, rows: RowParams, *, vocab_size: int, base_is_row: bool
) -> Tensor:
    """``search_threshold`` in torch; the maxima are not read."""
    keys = order_keys(logits, vocab_size=vocab_size)
    return search_in_order(keys, known, rows, vocab_size=vocab_size, base_is_row=base_is_row)


@holds(tokens=True)
def order_keys(logits: Tensor, *, vocab_size: int) -> Tensor:
    """The order key of every token, int32 ``[R, V]``, of float32, bfloat16 or float16 logits ``[R, >=V]``."""
    return order_key(row_logits(logits, vocab_size))


def search_in_order(keys: Tensor, known: Threshold, rows: RowParams, *, vocab_size: int, base_is_row: bool) -> Tensor:
    """The threshold of every row, int64 ``[R]``, from the order keys ``[R, V]``: the host waits for which are open."""
    which, parameters = (known.packed, known.is_open, known.row_mass), (rows.scale, rows.top_k, rows.top_p)
    threshold: Tensor = torch.ops.compiled_sampler.search_in_order(keys, *which, *parameters, vocab_size, base_is_row)
    return threshold


def _search_in_order(
    first_tokens: Callable[[Tensor, int], Tensor],
    token_at: Callable[[Tensor, Tensor], Tensor],
    keys: Tensor,
    packed: Tensor,
    is_open: Tensor,
    row_mass: Tensor,
    scale: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    vocab_size: int,
    base_is_row: bool,
) -> Tensor:
    """The thresholds ``[R]`` after a search of the open rows, in the first ``_ENOUGH`` tokens, then in all."""
    index = is_open.nonzero().flatten()
    for count in (min(_ENOUGH, vocab_size), vocab_size):
        asked = keys[index]
        ordered = first_tokens(asked, count)
        parameters, base = (scale[index], top_k[index], top_p[index], row_mass[index]), base_is_row
        last, base_known, ends = threshold_in_prefix(ordered, *parameters, vocab_size=vocab_size, base_is_row=base)
        packed = packed.index_copy(0, index, token_at(asked, last))
        index = index[~(base_known & ends)]
    return packed


def _first_places(keys: Tensor, count: int) -> Tensor:
    """The keys of the first tokens of the order with their places, int64 ``[R, count]`` packed, on the CPU."""
    return number(largest(keys, count))  # the filters need no ids, and numpy sorts 32 bits faster than 64


def _token_at(keys: Tensor, place: Tensor) -> Tensor:
    """The packed (order key, id) of the token at a place in the order, int64 ``[R]``, on the CPU."""
    # keys: int32 [R, V], by id; place: int64 [R], packed (order key, place).
    key, before = packed_key(place), packed_id(place)
    ids = np.empty(keys.shape[0], np.int32)
    for row, (tokens, k, n) in enumerate(zip(keys.numpy(), key.numpy(), before.numpy(), strict=True)):
        ids[row] = np.flatnonzero(tokens == k)[n - np.count_nonzero(tokens > k)]
    return pack(key, torch.from_numpy(ids))


def _first_tokens(keys: Tensor, count: int) -> Tensor:
    """The first tokens of the order, int64 ``[R, count]`` packed (order key, id), on a GPU."""
    return number(keys).sort(descending=True).values[:, :count]


def _unfilled(keys: Tensor, packed: Tensor, *_: object) -> Tensor:
    return torch.empty_like(packed)


torch.library.define(
    "compiled_sampler::search_in_order",
    "(Tensor keys, Tensor packed, Tensor is_open, Tensor row_mass, Tensor scale, Tensor top_k, Tensor top_p, "
    "int vocab_size, bool base_is_row) -> Tensor",
)
# a custom_op imports Dynamo at its first call
_on_cpu = functools.partial(_search_in_order, _first_places, _token_at)
_on_gpu = functools.partial(_search_in_order, _first_tokens, lambda _, token: token)
torch.library.impl("compiled_sampler::search_in_order", "cpu", _on_cpu)
torch.library.impl("compiled_sampler::search_in_order", "cuda", _on_gpu)
torch.library.register_fake("compiled_sampler::search_in_order", _unfilled)
