"""Requests with known edits: tables in which every edit acts on some requests and leaves others alone.

They have the sizes of given tables, but for the number of slots, and stand on the CPU. They follow from these sizes
and the vocabulary alone, and hold what their documentation in ``edit_tables.py`` allows. What takes longest to make is
kept, since each round of each step reads the same; nobody writes it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.core.arithmetic.mass import FLOAT_MAX
from compiled_sampler.edit_params import MOST_REPEATED
from compiled_sampler.edit_tables import (
    NO_TOKEN,
    UNWRITTEN,
    AllowedIds,
    BadWords,
    BiasLists,
    Dry,
    EditTables,
    History,
    MinK,
    Penalties,
    PLess,
    RowFilters,
    StopLists,
    TopNSigma,
    TypicalP,
    Watermarks,
    Xtc,
)
from compiled_sampler.edits.recording import entries_of

NUM_REQUESTS = 6
"""Requests that differ; a request n has, of most edits, the n-th number below."""
PROMPT_LENS = (3, 0, 2, 7, 1, 5)
_BIASES = (1.5, -math.inf, -3.25, 1e38, 0.0, -1e30, 20.0)
_SCALES = (math.log2(math.e), 0.5, 3.0, 14.0, 1.0, 1e5)
_NEAR_1 = 1.0 - 2.0**-53
_KEPT = 4  # tables of different sizes


def known_tables(like: EditTables, vocab_size: int) -> EditTables:
    """The tables of the library's edits of ``NUM_REQUESTS`` requests; None where ``like`` has none.

    Args:
        like: tables of any number of slots, whose sizes they have.
        vocab_size: V.
    """
    length = 0 if like.history is None else like.history.entries.shape[2]
    words = None if like.words is None else like.words.token_ids.shape[1:]
    return EditTables(
        allowed=None if like.allowed is None else AllowedIds(known_words(like.allowed.words.shape[1]).flip(0)),
        bias=None if like.bias is None else _biases(like.bias.token_ids.shape[1], vocab_size),
        stops=None if like.stops is None else known_stops(like.stops.token_ids.shape[1], vocab_size),
        penalties=None if like.penalties is None else _penalties(),
        dry=None if like.dry is None else _dry(like.dry.breakers.shape[1], vocab_size),
        words=None if words is None else _bad_words(words, length, vocab_size),
        history=None if like.history is None else known_history(length, vocab_size),
        filters=None if like.filters is None else _filters(like.filters),
    )


@functools.lru_cache(_KEPT)
def known_history(length: int, vocab_size: int) -> History:
    """Texts of few tokens that come back, one of them empty and one half as long as there is room: ``[n, 3, L]``."""
    counts = (length, 0, length, length, length // 2, length)
    texts = (_text(n, count, vocab_size) for n, count in enumerate(counts))
    made = [entries_of(text, PROMPT_LENS[n], length) for n, text in enumerate(texts)]
    is_read = [int(count > 0) for count in counts]
    return History(torch.from_numpy(np.stack(made)), _ints(PROMPT_LENS), _ints(is_read))


def _text(request: int, count: int, vocab_size: int) -> list[int]:
    """Two to four tokens in turn, and now and then another one."""
    first, apart, period = 11 * request, max(1, vocab_size // 7), 2 + request % 3
    return [(first + (1 + i if i % 13 == 5 else apart * (i % period))) % vocab_size for i in range(count)]


def known_stops(width: int, vocab_size: int) -> StopLists:
    """No token, one and as many as there are, at most ``width``; the ids are those of ``ids_after`` token 0."""
    most = min(width, vocab_size)
    counts, least = (most, 0, 1, most, most, 1), (0, 5, 2**31 - 1, 2, 0, 1)
    ids = ids_after(torch.zeros(NUM_REQUESTS, dtype=torch.int64), width, vocab_size)
    return StopLists(_ints(PROMPT_LENS), _ints(least), _ints(counts), ids)


def ids_after(token_ids: Tensor, count: int, vocab_size: int) -> Tensor:
    """A token and others at equal distances, int32 ``[n, count]``, of which as many as there are differ.

    Args:
        token_ids: int64 ``[n]``.
        count: tokens of each.
        vocab_size: V.
    """
    apart = max(1, vocab_size // count)
    return ((token_ids[:, None] + apart * torch.arange(count)) % vocab_size).to(torch.int32)


def known_watermarks() -> Watermarks:
    """Keys of no token and of some."""
    return Watermarks(_ints((2, 0, 8, 1, 0, 4)))


def known_words(count: int) -> Tensor:
    """Bits of the tokens that may be drawn, int32 ``[n, count]``: half of them, all, few, and none."""
    generator = torch.Generator().manual_seed(count)
    half, other, third = torch.randint(-(2**31), 2**31, (3, count), generator=generator)
    every, none = torch.full_like(half, -1), torch.zeros_like(half)
    return torch.stack([half, every, half & other & third, half | other, every, none]).to(torch.int32)


@functools.lru_cache(_KEPT)
def _biases(width: int, vocab_size: int) -> BiasLists:
    most = min(width, vocab_size)
    counts = (most, 0, 1, most // 2, 0, most)
    ids, biases = torch.full((NUM_REQUESTS, width), NO_TOKEN), torch.zeros(NUM_REQUESTS, width)
    for request, count in enumerate(counts):
        ids[request, :count] = torch.arange(count) * vocab_size // max(count, 1)
        biases[request, :count] = torch.tensor([_BIASES[(request + i) % len(_BIASES)] for i in range(count)])
    return BiasLists(_ints(counts), ids.to(torch.int32), biases)


def _penalties() -> Penalties:
    repetition = torch.tensor([1.3, 1.5, 1.0, 2.0**-20, 1.0, 2.0**20])
    return Penalties(
        repetition=repetition,
        inverse=(1.0 / repetition.to(torch.float64)).to(torch.float32),
        frequency=torch.tensor([0.5, 1.0, 0.0, -2.0, 0.0, 2.0]),
        presence=torch.tensor([0.0, 1.5, -1.5, 2.0, 0.0, 0.25]),
        of_output=_ints((0, 1, 0, 1, 0, 1)),
    )


@functools.lru_cache(_KEPT)
def _dry(width: int, vocab_size: int) -> Dry:
    laws = (0.8, 1.75, 1), (3.0, 1.0, 2), (0.0, 1.0, 1), (1e6, 1000.0, 1), (0.5, 2.0, 4), (2.0, 1.1, 1)
    penalties = [[_penalty(*law, length) for length in range(MOST_REPEATED + 1)] for law in laws]
    breakers = [[(11 * n + i) % vocab_size for i in range(width)] for n in range(NUM_REQUESTS)]
    counts = [min(count, width, vocab_size - 1) for count in (0, 1, 0, 1, 0, 2)]
    return Dry(_ints((0, 3, 0, 7, 0, 100)), torch.tensor(penalties), _ints(counts), _ints(breakers))


def _penalty(multiplier: float, base: float, least: int, length: int) -> float:
    """What is subtracted for a repetition of a length."""
    return 0.0 if length < least else min(multiplier * base ** (length - least), FLOAT_MAX)


@functools.lru_cache(_KEPT)
def _bad_words(sizes: torch.Size, history_len: int, vocab_size: int) -> BadWords:
    """Words that begin as the texts go on at some positions, of every length; the first one may be a single token."""
    num_words, width = sizes
    made = np.full((NUM_REQUESTS, num_words, width), UNWRITTEN, np.int32)
    for request, words in enumerate(made):
        text = _text(request, min(num_words + width, history_len), vocab_size)
        for word, tokens in enumerate(words):
            length = 1 if word == request % 2 else min(2 + word // 4, width)
            ids = [*text[word : word + length - 1], (31 * word + request) % vocab_size]
            tokens[width - len(ids) :] = ids
    counts = (num_words, 1, num_words, min(5, num_words), 0, num_words)
    return BadWords(_ints(counts), torch.from_numpy(made), _ints((0, 0, PROMPT_LENS[2], 0, 0, PROMPT_LENS[5])))


def _filters(like: RowFilters) -> RowFilters:
    """One filter or two of each request, so that tokens are left for the later one."""
    sigma, shares = (1.0, 0.0, 0.0, 2.0, 0.0, 0.0), (1.0, 1.0, 0.5, 1.0, 1.0, 0.9)
    thresholds, chances = (0.1, 0.1, 0.02, 0.0, 0.02, 0.05), (2.0**-53, 0.0, 0.5, 1.0, _NEAR_1, 1.0)
    return RowFilters(
        scale=torch.tensor(_SCALES),
        top_n_sigma=None if like.top_n_sigma is None else TopNSigma(_doubles(sigma)),
        min_k=None if like.min_k is None else MinK(_doubles((-1.0, 0.0, 3.0, -1.0, 60.0, -1.0))),
        p_less=None if like.p_less is None else PLess(_ints((0, 1, 0, 0, 1, 0))),
        typical_p=None if like.typical_p is None else TypicalP(_doubles(shares)),
        xtc=None if like.xtc is None else Xtc(_doubles(thresholds), _doubles(chances)),
    )


def _ints(values: Sequence[int] | Sequence[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _doubles(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
