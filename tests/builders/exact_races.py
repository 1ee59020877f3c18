"""Verification without chance: races without noise, the laws of their winners, and how many numbers accept a draft."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler.core import score
from compiled_sampler.core.order import MASKED_KEY, score_order
from compiled_sampler.speculation import residual

WORDS = 2**32
"""Numbers that a draft may meet."""
SMALLEST, LARGEST = 2.0**-33, 1.0 - 2.0**-33
Race = tuple[Tensor, Tensor]
"""Ids and keys of the last tokens, ``[N, n]``."""


@contextmanager
def without_noise(races: list[Race]) -> Iterator[pytest.MonkeyPatch]:
    """Within, scores have no noise, and the races for the last tokens are kept; the patch may change more."""
    final_race = residual.final_race

    def watch(x: Tensor, values: Any, ids: Tensor, *others: Any, **static: Any) -> Any:
        keys, is_left = final_race(x, values, ids, *others, **static)
        counts = is_left | ~is_left.flatten(1).any(-1).view(-1, *[1] * (x.dim() - 1))
        races.append((ids.expand(x.shape).flatten(1), torch.where(counts, keys, MASKED_KEY).flatten(1)))
        return keys, is_left

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "gumbel", lambda keys, ids: torch.zeros((keys.first + ids).shape))
        patch.setattr(residual, "final_race", watch)
        yield patch


def weights(race: Race, vocab_size: int) -> Tensor:
    """How often each token would win with noise, up to a factor for each row: a score of s draws as ``2**s`` does."""
    ids, keys = race
    found = torch.where(keys > MASKED_KEY, score_order(keys).view(torch.float32).double().exp2(), 0.0)
    places = ids.long().clamp(max=vocab_size)
    return found.new_zeros(len(ids), vocab_size + 1).scatter_add(1, places, found)[:, :vocab_size]


def accepted_words(accepts: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """How many of the numbers each of the comparisons accepts, the smallest ones: int64 ``[count]``."""
    low, high = torch.zeros(count, dtype=torch.int64), torch.full((count,), WORDS)
    for _ in range(33):
        middle = (low + high) // 2
        accepted = accepts((2 * middle + 1).double() * SMALLEST) & (low < high)
        low, high = torch.where(accepted, middle + 1, low), torch.where(accepted, high, torch.maximum(low, middle))
    return low
