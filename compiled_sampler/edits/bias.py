"""Biases of the logits of tokens that a request names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.core.order import indices, without_denormals
from compiled_sampler.edits.changes import EditedTokens, ListWriter, add_to_bits, edited_tokens, entry_ids
from compiled_sampler.edits.edit_spec import Column, EditSpec, Parameter, checked_token_id, normal
from compiled_sampler.edits.history import AnyHistory
from compiled_sampler.scalars import checked_float

NO_TOKEN = 2**31 - 1  # what stands behind the last token of an ascending list
_MASKED = float("-inf")
_MOST_BIAS = float(np.finfo(np.float32).max)


class BiasLists(NamedTuple):
    """What is added to logits."""

    counts: Tensor  # int32 [S], entries of each request
    token_ids: Tensor  # int32 [S, n], ascending, each id once, then NO_TOKEN
    biases: Tensor  # float32 [S, n], finite or -inf

    def write(self, writer: ListWriter, slots: Tensor, positions: Tensor, history: AnyHistory | None) -> None:
        """Biases."""
        writer.add(write_biases, slots, self)


def write_biases(
    x: Tensor, bits: Tensor, slots: Tensor, lists: BiasLists, *, vocab_size: int, tells: bool = False
) -> EditedTokens | None:
    """What ``take_back`` undoes, None unless ``tells``; biases are in the logits afterwards."""
    slot, place = slots.clamp(min=0), indices(lists.token_ids.shape[1], slots.device)
    is_entry = place < torch.where(slots >= 0, lists.counts[slot], 0)[:, None]
    ids = entry_ids(lists.token_ids[slot], is_entry, vocab_size)
    before, bias = x.gather(1, ids), lists.biases[slot]
    # a bias of -inf masks its token, whatever the logit is
    after = torch.where(bias == _MASKED, _MASKED, without_denormals(without_denormals(before) + bias))
    return add_to_bits(bits, edited_tokens(ids, before, after, is_entry), tells)


def checked_bias(name: str, values: object) -> tuple[tuple[int, float], ...]:
    """Biases as pairs of a token id and a number that float32 holds, by ascending id."""
    if values is None:
        return ()
    # a mapping has the form of OpenAI's ``logit_bias``
    pairs = list(values.items()) if isinstance(values, Mapping) else _pairs(name, values)
    made: dict[int, float] = {}
    for key, value in pairs:
        token = checked_token_id(name, int(key) if isinstance(key, str) and key.isdecimal() else key)
        bias = checked_float(f"{name} of token {token}", value)
        if not (bias == -math.inf or abs(bias) <= _MOST_BIAS):
            raise ValueError(f"{name} of {token} must be finite in float32 or -inf, got {value}; -inf masks a token")
        if token in made:
            raise ValueError(f"{name} must name a token once, got {token} twice; add its biases")
        made[token] = float(np.float32(bias))
    return tuple(sorted(made.items()))


def _pairs(name: str, values: object) -> list[tuple[object, object]]:
    if isinstance(values, Iterable) and not isinstance(values, str | bytes):
        found = [tuple(each) if isinstance(each, tuple | list) else () for each in values]
        if all(len(each) == 2 for each in found):
            return [(each[0], each[1]) for each in found]
    raise TypeError(f"{name} must map token ids to numbers, got {values!r}; {{id: bias}}")


LOGIT_BIAS = EditSpec(
    name="logit_bias",
    kind="list",
    parameters={"logit_bias": Parameter(checked_bias, in_vllm=True)},
    wanted=lambda params: bool(params.logit_bias),
    entries={"biases": lambda params: len(params.logit_bias)},
    named_ids={"logit_bias": lambda params: [token for token, _ in params.logit_bias]},
    table=BiasLists,
    columns={
        "counts": Column(lambda params, row: len(params.logit_bias)),
        "token_ids": Column(
            lambda params, row: [token for token, _ in params.logit_bias],
            off=NO_TOKEN,
            shape=lambda sizes, vocab_size: (sizes.biases,),
        ),
        "biases": Column(
            lambda params, row: [normal(bias) for _, bias in params.logit_bias],
            dtype=torch.float32,
            shape=lambda sizes, vocab_size: (sizes.biases,),
        ),
    },
)
