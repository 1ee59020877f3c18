"""The filter min-k: the tokens before the cliff of a row, the steepest drop of its logits in descending order.

Source: Ding et al., "Min-k sampling: decoupling truncation from temperature scaling via relative logit dynamics", arXiv
2604.11012, whose algorithm 1 is taken as vLLM's open pull request 48142 has it. Of the n tokens that no mask hides, in
descending order ``x_1 >= ... >= x_n`` with the range ``x_1 - x_n``, the first k stay: the larger of ``argmax_i (x_i -
x_{i+1}) / (range * i)`` over the n - 1 drops, the cliff, and of ``floor(tau / range)``. The range is the same for all
drops of a row, so the cliff is found without it; the first of equal drops counts. Tokens with the logit of the k-th
stay too, so in a row of equal logits all do.

The drops and the range are each rounded once to float32, at most the largest; denormals count as 0. What follows is
exact, however a compiler orders it: quotients of such a drop and a rank below 2**22 that differ do so by ``2**-46`` of
themselves, so products with reciprocals, which are off by ``2**-50``, tell the first of the largest; and a rank
times the range has 46 bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.core.arithmetic import reciprocal
from compiled_sampler.core.order import indices, is_visible, key_float, order_key, row_logits, without_denormals
from compiled_sampler.core.stage import holds
from compiled_sampler.edits.row_filters import MinK
from compiled_sampler.passes.top_n_sigma import distance_below

_NEARLY = 1.0 - 2.0**-48


@holds(tokens=True)
def drop_keys(logits: Tensor, *, vocab_size: int) -> Tensor:
    """The order keys of a row's logits, int32 ``[R, V]``, with that of 0 for denormals."""
    return order_key(without_denormals(row_logits(logits, vocab_size)))


def descending(keys: Tensor) -> Tensor:
    """The keys of each row in descending order: int32 ``[R, V]``."""
    return keys.sort(-1, descending=True).values


def cliff_logit(ordered: Tensor, slots: Tensor, min_k: MinK) -> Tensor:
    """The least logit that a token may have, float32 ``[R]``; -inf keeps every token."""
    # A row with a +inf keeps all: the race is among such tokens anyway.
    x = key_float(ordered)
    following = F.pad(x[:, 1:], (0, 1), value=float("-inf"))
    rank = indices(x.shape[1], x.device) + 1
    cliff = first_steepest(torch.where(is_visible(following), distance_below(x, following), 0.0), rank)
    least = torch.where(is_visible(x), x, float("inf")).amin(-1)
    length = distance_below(x[:, 0], least).to(torch.float64)
    tau = min_k.tau[slots.clamp(min=0)]
    is_kept = (rank <= cliff[:, None]) | (rank.to(torch.float64) * length[:, None] <= tau[:, None])
    last = torch.where(is_kept & is_visible(x), x, float("inf")).amin(-1)
    is_used = (tau >= 0.0) & (slots >= 0) & (x[:, 0] < float("inf"))
    return torch.where(is_used, last, float("-inf"))


def first_steepest(drop: Tensor, rank: Tensor) -> Tensor:
    """The first rank of the largest quotient of a drop and its rank: int32 ``[R]``."""
    # drop: float32 [R, n], >= 0, no denormal; rank: int32 [n], in [1, 2**22).
    weight = drop.to(torch.float64) * reciprocal(rank.to(torch.float64))
    is_steepest = weight >= weight.amax(-1, keepdim=True) * _NEARLY
    return torch.where(is_steepest, rank, 2**22).amin(-1)


@holds(tokens=True)
def above_cliff(logits: Tensor, least: Tensor, *, vocab_size: int) -> Tensor:
    """The logits with -inf for those below ``least``: float32 ``[R, V]`` in new memory."""
    # A NaN stays, so that the status of its row says so.
    x = row_logits(logits, vocab_size)
    return torch.where(without_denormals(x) < least[:, None], float("-inf"), x)
