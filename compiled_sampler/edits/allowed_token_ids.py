"""The only tokens that a request may draw, a bit for each token of the vocabulary; ``masks.py`` applies it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from compiled_sampler.edits.edit_spec import Column, EditSpec, Parameter, Params, SlotRow, checked_token_ids


class AllowedIds(NamedTuple):
    """The tokens that may be drawn."""

    words: Tensor  # int32 [S, ceil(V / 32)], a bit for each token, lowest first; -1 in all words allows every token


def _checked(name: str, values: object) -> tuple[int, ...] | None:
    if values is None:
        return None
    token_ids = checked_token_ids(name, values)
    if not token_ids:
        raise ValueError(f"{name} must have a token, got none; None allows all")
    return token_ids


def _check_vocabulary(params: Params, vocab_size: int) -> None:
    allowed = params.allowed_token_ids
    if min(allowed) >= vocab_size:
        rule = f"allowed_token_ids must have a token below vocab_size {vocab_size}"
        raise ValueError(f"{rule}, got {min(allowed)} and above; None allows all")


def _words(params: Params, row: SlotRow) -> np.ndarray:
    """A bit for each token, int32 ``[ceil(V / 32)]``."""
    ids = np.array([token for token in params.allowed_token_ids if token < row.vocab_size], np.int64)
    words = np.zeros(-(-row.vocab_size // 32), np.uint32)
    np.bitwise_or.at(words, ids >> 5, np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32)))
    return words.view(np.int32)


ALLOWED_TOKEN_IDS = EditSpec(
    name="allowed_token_ids",
    kind="mask",
    parameters={"allowed_token_ids": Parameter(_checked, in_vllm=True)},
    wanted=lambda params: params.allowed_token_ids is not None,
    check_vocabulary=_check_vocabulary,
    table=AllowedIds,
    columns={"words": Column(_words, off=-1, shape=lambda sizes, vocab_size: (-(-vocab_size // 32),))},
)
