"""The wide path: the exact top-k and top-p threshold of a row of any width.

By definition: sort the whole row, apply the filters, name the last token kept (``tests/sorted_threshold.py``). On the
CPU the same filters see the first 4,096 places of the order, then all; ``wide_settle.py`` spares most draws that. On
CUDA a search (``triton/operators.py``) finds the same threshold, reads a row about once and skips rows that need none.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

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
from compiled_sampler.core.rows import Entries, Rows
from compiled_sampler.passes.blocks import in_blocks
from compiled_sampler.passes.maxima import rows_of_blocks
from compiled_sampler.passes.narrowing import number
from compiled_sampler.passes.selection import largest

_ENOUGH = 4096  # on the CPU, tokens that most filters end in; for the other rows all are put in order


class Weighed(NamedTuple):
    """What is known of rows after the first pass, without their candidates."""

    rows: Rows
    """``[R]``, parameters."""
    row_max: Tensor
    """float32 ``[R]``, the largest logit."""
    outgrown: Tensor
    """bool ``[R]``, true where at most top-p filters, and keeps more tokens than there are candidates for certain."""


class Threshold(NamedTuple):
    """The last token that top-k and top-p keep, where it is known."""

    packed: Tensor
    """int64 ``[R]``, its packed (order key, id)."""
    pending: Tensor
    """bool ``[R]``, true where it is still to be found."""
    beyond: Tensor
    """bool ``[R]``, true where tokens beyond the first C may be kept."""
    row_mass: Tensor
    """int64 ``[R]``, the mass of the row."""


def block_masses(logits: Tensor, row_max: Tensor, scale: Tensor, *, vocab_size: int, block: int) -> Tensor:
    """The mass of each block of a row: int64 ``[R, ceil(V / block)]``.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        row_max: float32 ``[R]``, the largest logit.
        scale: float32 ``[R]``, ``log2(e) / temperature``.
        vocab_size: V.
        block: tokens a block.
    """
    x = in_blocks(row_logits(logits, vocab_size), block, float("-inf"))
    return exp2_mass(scaled_logits(x, row_max[:, None, None], scale[:, None, None])).sum(-1)


def threshold_among(
    ordered: Tensor,
    scale: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    row_mass: Tensor,
    *,
    vocab_size: int,
    base_is_row: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The last of the first C tokens that top-k and top-p keep: int64 ``[R]``.

    Then, bool ``[R]`` each, where the base of top-p is known, without which the first means nothing, and where no token
    beyond the first C is kept.

    Args:
        ordered: int64 ``[R, C]``, packed keys in descending order.
        scale: float32 ``[R]``, ``log2(e) / temperature``.
        top_k: int64 ``[R]``.
        top_p: float64 ``[R]``.
        row_mass: int64 ``[R]``, the mass of the row.
        vocab_size: V.
        base_is_row: whether top-p is measured on the whole row rather than on the mass after top-k.
    """
    mass = top_k_mass(ordered, ordered_logits(ordered, scale), top_k)
    fits = top_k <= ordered.shape[1]
    base = row_mass if base_is_row else torch.where(fits, mass.sum(-1), row_mass)
    base_known = fits | measured_on_row(top_k, top_p, vocab_size=vocab_size, base_is_row=base_is_row)
    keep = keep_prefix(ordered, mass, top_k, top_p, base)
    return last_kept(ordered, keep), base_known, fits | ~keep.all(-1)  # a prefix: all, if the last is


def measured_on_row(top_k: Tensor, top_p: Tensor, *, vocab_size: int, base_is_row: bool) -> Tensor:
    """True where the mass of the row is the base of top-p, or top-p keeps all: bool ``[R]``.

    Arguments as ``threshold_among``.
    """
    return (top_k >= vocab_size) | (top_p >= 1.0) | base_is_row


def weigh(keys: Tensor, entries: Entries, *, vocab_size: int, capacity: int, stream: int) -> Weighed:
    """The parameters and the largest logit of each row, and what follows from what its blocks weigh at least.

    A block weighs no less than its first token, and no token weighs more than ``2**MASS_BITS``.

    Args:
        keys: int32 ``[R, B]``, the largest order key of each block.
        entries: ``[R]``.
        vocab_size: V.
        capacity: C, of the candidates.
        stream: of the noise.
    """
    rows, row_max = rows_of_blocks(keys, entries, stream=stream)
    least = exp2_mass(scaled_logits(key_float(keys), row_max[:, None], rows.scale[:, None])).sum(-1)
    alone = rows.live & (rows.top_k >= max(vocab_size, capacity + 1)) & (rows.min_p_log2 == float("-inf"))
    return Weighed(rows, row_max, alone & (mass_cut(rows.top_p, least) > capacity << MASS_BITS))


def row_masses(masses: Tensor) -> Tensor:
    """The mass of each row, int64 ``[R]``, from those of its parts ``[R, n]``."""
    return masses.sum(-1)


def known_threshold(ordered: Tensor, rows: Rows, row_mass: Tensor, *, vocab_size: int, base_is_row: bool) -> Threshold:
    """The threshold of each row where filters end within the first C tokens.

    Args:
        ordered: int64 ``[R, C]``, packed keys of the first C tokens in descending order.
        rows: per-row parameters ``[R]``.
        row_mass: int64 ``[R]``, the mass of the row.
        vocab_size: V.
        base_is_row: whether top-p is measured on the whole row rather than on the mass after top-k.
    """
    parameters = (rows.scale, rows.top_k, rows.top_p, row_mass)
    last, base_known, ends = threshold_among(ordered, *parameters, vocab_size=vocab_size, base_is_row=base_is_row)
    ends = ends | ~keep_min_p(ordered_logits(ordered, rows.scale), rows.min_p_log2).all(-1)
    keeps_all = (rows.top_k >= vocab_size) & (rows.top_p >= 1.0)
    beyond = ~(base_known & ends) & rows.live
    return Threshold(torch.where(keeps_all, KEEP_ALL, last), beyond & ~keeps_all, beyond, row_mass)


def unknown_threshold(
    keys: Tensor, entries: Entries, *, vocab_size: int, stream: int
) -> tuple[Rows, Tensor, Threshold]:
    """The parameters and the largest logit of each row, and that all tokens may be kept, if top-p keeps them.

    Args:
        keys: int32 ``[R, B]``, the largest order key of each block.
        entries: ``[R]``.
        vocab_size: V.
        stream: of the noise.
    """
    rows, row_max = rows_of_blocks(keys, entries, stream=stream)
    return rows, row_max, keeping_all(rows, rows.live & (rows.top_k < vocab_size), rows.live)


def keeping_all(rows: Rows, pending: Tensor, beyond: Tensor) -> Threshold:
    """A threshold that all tokens reach until a search; no search asks for the mass.

    Computed from the slots, as all else is: constants would be a kernel each.
    """
    return Threshold(torch.where(rows.live, KEEP_ALL, 0), pending, beyond, torch.where(rows.live, 1, 0))


def wide_threshold(
    logits: Tensor, known: Threshold, row_max: Tensor, rows: Rows, *, vocab_size: int, base_is_row: bool
) -> Tensor:
    """The threshold of every row, searching the pending ones: int64 ``[R]``, packed (order key, id).

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        known: what ``known_threshold`` found.
        row_max: float32 ``[R]``, from ``rows.rows_of_blocks``.
        rows: per-row parameters ``[R]``.
        vocab_size: V.
        base_is_row: as ``known_threshold``.
    """
    if not logits.is_cuda:
        keys = order_keys(logits, vocab_size=vocab_size)
        return threshold_by_keys(keys, known, rows, vocab_size=vocab_size, base_is_row=base_is_row)
    arguments = (logits, known.packed, known.pending, known.row_mass, row_max, rows.scale, rows.top_k, rows.top_p)
    threshold: Tensor = triton_operator("search_threshold")(*arguments, vocab_size, base_is_row)
    return threshold


@functools.cache
def triton_operator(name: str) -> Callable[..., Any]:
    """A Triton operator, imported when the first CUDA tensor asks for it: CPU builds of torch have no Triton.

    It runs on the device of its first tensor; Triton itself would launch on the current one.
    """
    operator: Callable[..., Any] = getattr(importlib.import_module("compiled_sampler.exact.triton.operators"), name)

    def on_its_device(first: Tensor, *arguments: Any) -> Any:
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            return operator(first, *arguments)

    return on_its_device


def order_keys(logits: Tensor, *, vocab_size: int) -> Tensor:
    """The order key of every token: float32, bfloat16 or float16 ``[R, >=V]`` to int32 ``[R, V]``."""
    return order_key(row_logits(logits, vocab_size))


def threshold_by_keys(keys: Tensor, known: Threshold, rows: Rows, *, vocab_size: int, base_is_row: bool) -> Tensor:
    """``wide_threshold`` on the CPU.

    Args:
        keys: int32 ``[R, V]``, the ``order_keys``.
        known: as ``wide_threshold``, like the others.
        rows: per-row parameters ``[R]``.
        vocab_size: V.
        base_is_row: as ``known_threshold``.
    """
    which, parameters = (known.packed, known.pending, known.row_mass), (rows.scale, rows.top_k, rows.top_p)
    threshold: Tensor = _cpu_search(keys, *which, *parameters, vocab_size, base_is_row)
    return threshold


@torch.library.custom_op("compiled_sampler::cpu_search", mutates_args=(), device_types="cpu")
def _cpu_search(
    keys: Tensor,
    packed: Tensor,
    pending: Tensor,
    row_mass: Tensor,
    scale: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    vocab_size: int,
    base_is_row: bool,
) -> Tensor:
    index = pending.nonzero().flatten()
    for count in (min(_ENOUGH, vocab_size), vocab_size):
        asked = keys[index]
        places = number(largest(asked, count))  # without token ids, for which the filters do not ask
        parameters, base = (scale[index], top_k[index], top_p[index], row_mass[index]), base_is_row
        last, base_known, ends = threshold_among(places, *parameters, vocab_size=vocab_size, base_is_row=base)
        packed = packed.index_copy(0, index, _token_at(asked, last))
        index = index[~(base_known & ends)]
    return packed


def _token_at(keys: Tensor, place: Tensor) -> Tensor:
    """The packed (order key, id) of a token from its order key and its place in the order: int64 ``[R]``.

    Args:
        keys: int32 ``[R, V]``, of all tokens by id.
        place: int64 ``[R]``, packed (order key, place).
    """
    key, before = packed_key(place), packed_id(place)
    ids = np.empty(keys.shape[0], np.int32)
    for row, (tokens, k, n) in enumerate(zip(keys.numpy(), key.numpy(), before.numpy(), strict=True)):
        ids[row] = np.flatnonzero(tokens == k)[n - np.count_nonzero(tokens > k)]
    return pack(key, torch.from_numpy(ids))


@_cpu_search.register_fake
def _(keys: Tensor, packed: Tensor, *_: object) -> Tensor:
    return torch.empty_like(packed)
