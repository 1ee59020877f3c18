"""Penalties of tokens that stand in a request's history: repetition, frequency and presence, in this order.

Each token of the history is found once, at its last position before the row's own, whose entry knows how many times the
token was drawn. So no table of counts by token is held or made.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.core.order import indices, without_denormals
from compiled_sampler.core.stage import holds
from compiled_sampler.edits.changes import EditedTokens, ListWriter, add_to_bits, edited_tokens, entry_ids
from compiled_sampler.edits.edit_spec import Column, EditSpec, Parameter, check_scope, in_range, normal
from compiled_sampler.edits.history import ORDINAL, SUCCESSOR, TOKEN, AnyHistory, texts_of


class Penalties(NamedTuple):
    """Penalties of tokens that the history holds."""

    repetition: Tensor  # float32 [S], in [2**-20, 2**20]; what negative logits are multiplied by, 1 for no penalty
    inverse: Tensor  # float32 [S], 1 / repetition rounded once; what positive logits are multiplied by
    frequency: Tensor  # float32 [S], in [-2, 2]; subtracted for each time that the token was drawn
    presence: Tensor  # float32 [S], in [-2, 2]; subtracted once if the token was drawn
    of_output: Tensor  # int32 [S], 1 if repetition is of tokens that were drawn alone, 0 if of those of the prompt too

    def write(self, writer: ListWriter, slots: Tensor, positions: Tensor, history: AnyHistory | None) -> None:
        """Penalties."""
        writer.add(write_penalties, slots, positions, self, history)


@holds(position_bytes=51)  # tokens and what is added, gathered and as indices
def write_penalties(
    x: Tensor,
    bits: Tensor,
    slots: Tensor,
    positions: Tensor,
    penalties: Penalties,
    history: AnyHistory,
    *,
    vocab_size: int,
    tells: bool = False,
) -> EditedTokens | None:
    """What ``take_back`` undoes, None unless ``tells``; penalties are in the logits afterwards, biases before."""
    slot, text, most = slots.clamp(min=0), texts_of(history, slots), history.entries.shape[2]
    is_last = _is_last(text, positions.clamp(max=most).to(torch.int32), history) & (slots >= 0)[:, None]
    ids = entry_ids(history.entries[text, TOKEN], is_last, vocab_size)
    before, drawn = x.gather(1, ids), history.entries[text, ORDINAL]
    after = penalized_logits(before, drawn, Penalties(*(each[slot][:, None] for each in penalties)))
    return add_to_bits(bits, edited_tokens(ids, before, after, is_last), tells)


def penalized_logits(x: Tensor, drawn: Tensor, penalties: Penalties) -> Tensor:
    """Logits of tokens that the history holds, after penalties: float32, each operation rounded once."""
    # Repetition is that of CTRL (1909.05858), as transformers and vLLM have it, with ``1 / r`` rounded before;
    # frequency and presence are those of OpenAI's API, in vLLM's order. A logit that no penalty changes keeps its bits.
    times, is_drawn = drawn.to(torch.float32), drawn > 0
    is_repeated = ((penalties.of_output == 0) | is_drawn) & (penalties.repetition != 1.0)
    is_lowered = is_drawn & ((penalties.frequency != 0.0) | (penalties.presence != 0.0))
    after = without_denormals(x)
    repeated = without_denormals(torch.where(after > 0, after * penalties.inverse, after * penalties.repetition))
    after = torch.where(is_repeated, repeated, after)
    after = without_denormals(after - without_denormals(penalties.frequency * times))
    after = without_denormals(after - penalties.presence * is_drawn.to(torch.float32))
    return torch.where(is_repeated | is_lowered, after, x)


def _is_last(text: Tensor, positions: Tensor, history: AnyHistory) -> Tensor:
    """Whether a position holds a token, and none before the row's own holds it later: bool ``[R, L]``."""
    entries, most = history.entries[text], history.entries.shape[2]
    here, following, place = entries[:, TOKEN], entries[:, SUCCESSOR], indices(most, text.device)
    there = history.entries[text[:, None], TOKEN, following.clamp(max=most - 1)]
    is_repeated = (following > place) & (following < positions[:, None]) & (there == here)
    return (place < positions[:, None]) & (here >= 0) & ~is_repeated


_SUBTRACTED = in_range("in [-2.0, 2.0]", lambda x: -2.0 <= x <= 2.0, "0 is none")
_REPETITION = in_range("in [2**-20, 2**20]", lambda x: 2.0**-20 <= x <= 2.0**20, "1 is none")
PENALTIES = EditSpec(
    name="penalties",
    kind="list",
    parameters={
        "repetition_penalty": Parameter(_REPETITION, in_vllm=True, in_generate=True),
        "repetition_scope": Parameter(check_scope),
        "frequency_penalty": Parameter(_SUBTRACTED, in_vllm=True),
        "presence_penalty": Parameter(_SUBTRACTED, in_vllm=True),
    },
    wanted=lambda params: (
        (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)
    ),
    table=Penalties,
    columns={
        "repetition": Column(lambda params, row: params.repetition_penalty, off=1, dtype=torch.float32),
        "inverse": Column(
            lambda params, row: 1.0 / np.float64(np.float32(params.repetition_penalty)), off=1, dtype=torch.float32
        ),
        "frequency": Column(lambda params, row: normal(params.frequency_penalty), dtype=torch.float32),
        "presence": Column(lambda params, row: normal(params.presence_penalty), dtype=torch.float32),
        "of_output": Column(lambda params, row: params.repetition_scope == "output"),
    },
    reads_history=True,
)
