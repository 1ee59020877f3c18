"""DRY, "don't repeat yourself": penalties of tokens that would prolong a repetition of what was just drawn.

Source: Philipp Emanuel Weidmann, pull request 5677 of text-generation-webui, with the range and the exemption of
breakers as llama.cpp has them. A token of the history is preceded by some tokens; the length of the repetition that it
would prolong is that of the longest end of the history which they end with too. Of several positions the longest
counts, and so the lowest logit: penalties ascend with lengths.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.core.order import indices, without_denormals
from compiled_sampler.edit_params import MOST_REPEATED
from compiled_sampler.edit_tables import TOKEN, UNWRITTEN, Dry, History
from compiled_sampler.edits.changes import entry_ids


def without_repetitions(
    x: Tensor, slots: Tensor, positions: Tensor, dry: Dry, history: History
) -> tuple[Tensor, Tensor]:
    """Tokens of each row's history, int64 ``[R, L]``, and what their logits become at most, float32.

    Positions that penalize nothing name other tokens, each its own, with the logits that these have.

    Args:
        x: float32 ``[R, V]``.
        slots: int64 ``[R]``; -1 for padding.
        positions: int64 ``[R]``, of the token to draw; what stands there or behind is not read.
        dry: by slot.
        history: by slot.
    """
    slot, most = slots.clamp(min=0), history.entries.shape[2]
    end, first = positions.clamp(max=most), positions - dry.ranges[slot]
    first = torch.where(dry.ranges[slot] > 0, first.clamp(min=0), 0)
    place, held = indices(most, x.device), history.entries[slot, TOKEN]
    last = history.entries[slot[:, None], TOKEN, _last_places(positions).clamp(0, most - 1)]
    last = torch.where((_last_places(positions) >= 0) & (_last_places(positions) < most), last, UNWRITTEN)
    last = torch.where(_is_breaker(last, slot, dry), UNWRITTEN, last)
    inside = (place[None, :] - first[:, None]).clamp(0, MOST_REPEATED)
    length = torch.minimum(_lengths(held, last), inside)
    is_penalized = (place < end[:, None]) & (held >= 0) & ~_is_breaker(held, slot, dry) & (slots >= 0)[:, None]
    token = entry_ids(held, is_penalized, x.shape[1])
    before = x.gather(1, token)
    penalty = torch.where(is_penalized, dry.penalties[slot[:, None], length], 0.0)
    after = without_denormals(without_denormals(before) - penalty)
    return token, torch.where(penalty > 0.0, after, before)


def _last_places(positions: Tensor) -> Tensor:
    """The positions before each row's own, int64 ``[R, MOST_REPEATED]``."""
    return positions[:, None] - MOST_REPEATED + torch.arange(MOST_REPEATED, device=positions.device)


def _lengths(held: Tensor, last: Tensor) -> Tensor:
    """How many tokens before each position are the last ones of the row: int64 ``[R, L]``, at most ``MOST_REPEATED``.

    Args:
        held: int32 ``[R, L]``, the tokens by position.
        last: int32 ``[R, MOST_REPEATED]``, the last ones; ``UNWRITTEN`` is like none.
    """
    before = F.pad(held, (MOST_REPEATED, 0), value=UNWRITTEN).unfold(1, MOST_REPEATED, 1)[:, :-1]
    # not int8: of one row Inductor's C++ finds another maximum of int8 (torch 2.13)
    number = torch.arange(1, MOST_REPEATED + 1, device=held.device, dtype=torch.int32)
    is_same = (before == last[:, None, :]) & (last >= 0)[:, None, :]
    return MOST_REPEATED - torch.where(is_same, 0, number).amax(-1).to(torch.int64)


def _is_breaker(tokens: Tensor, slot: Tensor, dry: Dry) -> Tensor:
    """Whether tokens ``[R, n]`` are sequence breakers of their request: bool."""
    number = torch.arange(dry.breakers.shape[1], device=tokens.device)
    breakers = torch.where(number < dry.num_breakers[slot][:, None], dry.breakers[slot], UNWRITTEN)
    return ((tokens[:, :, None] == breakers[:, None, :]) & (breakers >= 0)[:, None, :]).any(-1)
