"""Tokens that end a request, and how many must be drawn before one of them can be."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.edits.changes import ListWriter, list_entries
from compiled_sampler.edits.edit_spec import (
    PROMPT_LEN,
    Column,
    EditSpec,
    Parameter,
    Params,
    checked_flag,
    checked_token_id,
    checked_token_ids,
    count_in_range,
)
from compiled_sampler.edits.history import AnyHistory

_MASKED = float("-inf")


class StopLists(NamedTuple):
    """Tokens that end a request, and how many tokens must come before one."""

    prompt_lens: Tensor  # int32 [S], as in History
    min_tokens: Tensor  # int32 [S], tokens drawn before one that ends the request can be
    counts: Tensor  # int32 [S], tokens that end each request
    token_ids: Tensor  # int32 [S, T], each id once

    def write(self, writer: ListWriter, slots: Tensor, positions: Tensor, history: AnyHistory | None) -> None:
        """Masks of tokens that would come too early."""
        writer.put(without_stops, slots, positions, self)


def without_stops(x: Tensor, slots: Tensor, positions: Tensor, lists: StopLists) -> tuple[Tensor, Tensor]:
    """The tokens that end a request, int64 ``[R, T]``, and their logits: -inf before ``min_tokens`` were drawn."""
    slot, place, is_edited = list_entries(slots, lists.counts, lists.token_ids)
    ids = lists.token_ids[slot[:, None], place].to(torch.int64)
    before = x.gather(1, ids)
    is_early = positions - lists.prompt_lens[slot] < lists.min_tokens[slot]
    return ids, torch.where(is_early[:, None] & is_edited, _MASKED, before)


def _check_has_stop(params: Params) -> None:
    if params.min_tokens and not params.all_stop_token_ids and not params.ignore_eos:
        raise ValueError(
            f"min_tokens {params.min_tokens} must come with stop_token_ids or eos_token_id, which it keeps back, got "
            "none; ignore_eos=True says that none ends the request"
        )


_COLUMNS = {
    "prompt_lens": PROMPT_LEN,
    "min_tokens": Column(lambda params, row: params.min_tokens),
    "counts": Column(lambda params, row: len(params.all_stop_token_ids)),
    "token_ids": Column(lambda params, row: params.all_stop_token_ids, shape=lambda sizes, vocab_size: (sizes.stops,)),
}
MIN_TOKENS = EditSpec(
    name="min_tokens",
    kind="list",
    parameters={
        "min_tokens": Parameter(
            count_in_range("in [0, 2**31)", lambda n: 0 <= n < 2**31, "0 lets a request end at once"),
            in_vllm=True,
        )
    },
    wanted=lambda params: params.min_tokens > 0 and bool(params.all_stop_token_ids),
    check_request=_check_has_stop,
    table=StopLists,
    columns=_COLUMNS,
    reads_positions=True,
)
STOPS = EditSpec(
    name="stops",
    kind="end",
    parameters={
        "stop_token_ids": Parameter(checked_token_ids, in_vllm=True),
        "eos_token_id": Parameter(
            lambda name, value: None if value is None else checked_token_id(name, value),
            in_vllm=True,
            in_generate=True,
            in_openai=False,
        ),
        "ignore_eos": Parameter(
            lambda name, value: checked_flag(name, value, "True draws on behind eos_token_id"), in_vllm=True
        ),
    },
    wanted=lambda params: bool(params.all_stop_token_ids),
    entries={"stops": lambda params: len(params.all_stop_token_ids)},
    named_ids={
        "eos_token_id": lambda params: [token for token in params.all_stop_token_ids if token == params.eos_token_id],
        "stop_token_ids": lambda params: params.all_stop_token_ids,
    },
    table=StopLists,
    columns=_COLUMNS,
)
