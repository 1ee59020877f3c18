"""DRY, "don't repeat yourself": penalties of tokens that would prolong a repetition of what was just drawn.

Source: Philipp Emanuel Weidmann, pull request 5677 of text-generation-webui, with the range and the exemption of
breakers as llama.cpp has them. A token of the history is preceded by some tokens; the length of the repetition that it
would prolong is that of the longest end of the history which they end with too. Of several positions the longest
counts, and so the lowest logit: penalties ascend with lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.core.mass import FLOAT_MAX
from compiled_sampler.core.order import indices, without_denormals
from compiled_sampler.core.stage import holds
from compiled_sampler.edits.changes import ListWriter, entry_ids
from compiled_sampler.edits.edit_spec import (
    Column,
    EditSpec,
    Parameter,
    Params,
    checked_token_ids,
    count_in_range,
    in_range,
    normal,
)
from compiled_sampler.edits.history import TOKEN, UNWRITTEN, AnyHistory, last_tokens, texts_of

MOST_REPEATED = 50  # tokens of a repetition that DRY tells apart; longer ones are penalized like these


class Dry(NamedTuple):
    """Penalties of tokens that would prolong a repetition."""

    ranges: Tensor  # int32 [S], tokens before a row that are looked at; 0 for all
    penalties: Tensor
    """float32 ``[S, n + 1]``, what is subtracted by the length of the repetition, at most n tokens; 0 for none."""
    num_breakers: Tensor  # int32 [S], sequence breakers of each request
    breakers: Tensor  # int32 [S, K], tokens that no repetition holds, each id once

    def write(self, writer: ListWriter, slots: Tensor, positions: Tensor, history: AnyHistory | None) -> None:
        """Penalties of repetitions; a token that stands at several positions gets its largest one."""
        writer.put(without_repetitions, slots, positions, self, history, smallest=True)


@holds(position_bytes=270)  # an int32 and a bool for each length of a repetition
def without_repetitions(
    x: Tensor, slots: Tensor, positions: Tensor, dry: Dry, history: AnyHistory
) -> tuple[Tensor, Tensor]:
    """Tokens of each row's history, int64 ``[R, L]``, and what their logits become at most, float32."""
    slot, text, most = slots.clamp(min=0), texts_of(history, slots), history.entries.shape[2]
    end, first = positions.clamp(max=most), positions - dry.ranges[slot]
    first = torch.where(dry.ranges[slot] > 0, first.clamp(min=0), 0)
    place, held = indices(most, x.device), history.entries[text, TOKEN]
    last = last_tokens(text, positions, history, MOST_REPEATED)
    last = torch.where(_is_breaker(last, slot, dry), UNWRITTEN, last)
    inside = (place[None, :] - first[:, None]).clamp(0, MOST_REPEATED)
    length = torch.minimum(_lengths(held, last), inside)
    is_penalized = (place < end[:, None]) & (held >= 0) & ~_is_breaker(held, slot, dry) & (slots >= 0)[:, None]
    # positions that penalize nothing name other tokens, each its own, whose logits stay
    token = entry_ids(held, is_penalized, x.shape[1])
    before = x.gather(1, token)
    penalty = torch.where(is_penalized, dry.penalties[slot[:, None], length], 0.0)
    after = without_denormals(without_denormals(before) - penalty)
    return token, torch.where(penalty > 0.0, after, before)


def _lengths(held: Tensor, last: Tensor) -> Tensor:
    """How many tokens before each position are the last ones of the row: int64 ``[R, L]``, up to ``MOST_REPEATED``."""
    before = F.pad(held, (MOST_REPEATED, 0), value=UNWRITTEN).unfold(1, MOST_REPEATED, 1)[:, :-1]
    # not int8: of one row Inductor's C++ finds another maximum of int8 (torch 2.13)
    number = torch.arange(1, MOST_REPEATED + 1, device=held.device, dtype=torch.int32)
    # ``UNWRITTEN`` among the last ones is like none
    is_same = (before == last[:, None, :]) & (last >= 0)[:, None, :]
    return MOST_REPEATED - torch.where(is_same, 0, number).amax(-1).to(torch.int64)


def _is_breaker(tokens: Tensor, slot: Tensor, dry: Dry) -> Tensor:
    """Whether tokens ``[R, n]`` are sequence breakers of their request: bool."""
    number = torch.arange(dry.breakers.shape[1], device=tokens.device)
    breakers = torch.where(number < dry.num_breakers[slot][:, None], dry.breakers[slot], UNWRITTEN)
    return ((tokens[:, :, None] == breakers[:, None, :]) & (breakers >= 0)[:, None, :]).any(-1)


def penalties_by_length(params: Params) -> np.ndarray:
    """What DRY subtracts by the length of a repetition, float32 ``[MOST_REPEATED + 1]``; 0 for one that is allowed."""
    made, least = np.zeros(MOST_REPEATED + 1, np.float32), params.dry_allowed_length
    # Powers are exact fractions of ints, rounded to float64 and then to float32.
    (above, below), (base, scale) = params.dry_multiplier.as_integer_ratio(), params.dry_base.as_integer_ratio()
    for length in range(least, MOST_REPEATED + 1):
        made[length] = normal(min(above / below, FLOAT_MAX))  # Python rounds a quotient of ints once
        above, below = above * base, below * scale
    return made


def _range_of_llama_cpp(last_n: object) -> dict[str, Any]:
    """Parameters for llama.cpp's ``dry_penalty_last_n``, of which -1 is all tokens and 0 switches DRY off."""
    return {"dry_multiplier": 0.0} if last_n == 0 else {"dry_range": 0 if last_n == -1 else last_n}


DRY = EditSpec(
    name="dry",
    kind="list",
    parameters={
        "dry_multiplier": Parameter(in_range("in [0, 2**20]", lambda x: 0.0 <= x <= 2.0**20, "0 is none")),
        "dry_base": Parameter(
            in_range("in [1, 2**10]", lambda x: 1.0 <= x <= 2.0**10, "1 penalizes every length alike")
        ),
        "dry_allowed_length": Parameter(
            count_in_range(
                f"in [1, {MOST_REPEATED}]", lambda n: 1 <= n <= MOST_REPEATED, "dry_multiplier=0 penalizes nothing"
            )
        ),
        "dry_range": Parameter(
            count_in_range("in [0, 2**31)", lambda n: 0 <= n < 2**31, "0 looks at the whole history"),
            aliases={"dry_penalty_last_n": _range_of_llama_cpp},
        ),
        "dry_sequence_breakers": Parameter(checked_token_ids),
    },
    wanted=lambda params: params.dry_multiplier > 0.0,
    entries={"breakers": lambda params: len(params.dry_sequence_breakers)},
    named_ids={"dry_sequence_breakers": lambda params: params.dry_sequence_breakers},
    table=Dry,
    columns={
        "ranges": Column(lambda params, row: params.dry_range),
        "penalties": Column(
            lambda params, row: penalties_by_length(params),
            dtype=torch.float32,
            shape=lambda sizes, vocab_size: (MOST_REPEATED + 1,),
        ),
        "num_breakers": Column(lambda params, row: len(params.dry_sequence_breakers)),
        "breakers": Column(
            lambda params, row: params.dry_sequence_breakers, shape=lambda sizes, vocab_size: (sizes.breakers,)
        ),
    },
    reads_history=True,
)
