"""Noise keyed by the text instead of the position: the Gumbel watermark.

The noise of a row that a request draws with depends on its seed, which is then a key, and on the last n tokens before
it. So whoever has the key sees from the text alone that its tokens won by that noise (``examples/watermark.py``), and
who has not sees the law of the parameters. Source: Aaronson, "Watermarking of large language models", 2022; Kuditipudi
et al., arXiv 2307.15593, on what repeated contexts do to it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.edits.edit_spec import Column, EditSpec, Parameter, count_in_range
from compiled_sampler.edits.history import TOKEN, UNWRITTEN, History, RowPaths, texts_of

MOST_WATERMARK_TOKENS = 8
_MODULI = 2**31 - 1, 2**31 - 19  # primes, so that products of 31 bits stay below 2**62
_FACTORS = 48271, 69621


class Watermarks(NamedTuple):
    """What the noise of requests is keyed by."""

    num_tokens: Tensor
    """int32 ``[S]``, tokens before a row whose hash takes the place of the position; 0 for the position itself."""


def noise_positions(
    slots: Tensor, positions: Tensor, watermarks: Watermarks, history: History, paths: RowPaths | None = None
) -> Tensor:
    """The position of each row, or with a watermark a hash of its last tokens in 62 bits: int64 ``[R]``, >= 0."""
    # paths: the drafts before each row of trees, which are read in place: a row's own text would be a copy.
    text, most = texts_of(history, slots), history.entries.shape[2]
    count = watermarks.num_tokens[slots.clamp(min=0)].to(torch.int64)
    lanes = [torch.zeros_like(positions) for _ in _MODULI]
    for back in range(MOST_WATERMARK_TOKENS, 0, -1):
        place = positions - back
        held = history.entries[text, TOKEN, place.clamp(0, most - 1)].to(torch.int64)
        if paths is not None:
            offset = place - paths.starts
            drafted = paths.tokens.gather(1, offset.clamp(0, paths.tokens.shape[1] - 1)[:, None])[:, 0]
            held = torch.where((offset >= 0) & (offset < paths.lengths), drafted, held)
        # positions that hold no token count like one
        token = torch.where((place >= 0) & (place < most), held, UNWRITTEN) + 2
        pairs = zip(lanes, _MODULI, _FACTORS, strict=True)
        lanes = [torch.where(back <= count, (lane * by + token) % modulus, lane) for lane, modulus, by in pairs]
    return torch.where(count > 0, lanes[0] * 2**31 + lanes[1], positions)


WATERMARK = EditSpec(
    name="watermark",
    kind="noise",
    parameters={
        "watermark_tokens": Parameter(
            count_in_range(
                f"in [0, {MOST_WATERMARK_TOKENS}]", lambda n: 0 <= n <= MOST_WATERMARK_TOKENS, "0 is no watermark"
            )
        )
    },
    wanted=lambda params: params.watermark_tokens > 0,
    table=Watermarks,
    columns={"num_tokens": Column(lambda params, row: params.watermark_tokens)},
    reads_history=True,
)
