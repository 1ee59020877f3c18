"""Bad words: the last token of a sequence is masked where the others were just drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.edits.changes import ListWriter, list_entries
from compiled_sampler.edits.edit_spec import Column, EditSpec, Parameter, Params, SlotRow, check_scope, checked_token_id
from compiled_sampler.edits.history import UNWRITTEN, AnyHistory, last_tokens, texts_of

_MASKED = float("-inf")


class BadWords(NamedTuple):
    """Sequences of tokens that must not be completed."""

    counts: Tensor  # int32 [S], words of each request
    token_ids: Tensor  # int32 [S, W, M], each word at the end of its row, behind UNWRITTEN
    prompt_lens: Tensor  # int32 [S], as in History; 0 where words may begin in the prompt

    def write(self, writer: ListWriter, slots: Tensor, positions: Tensor, history: AnyHistory | None) -> None:
        """Masks of last tokens."""
        writer.put(without_bad_words, slots, positions, self, history)


def without_bad_words(
    x: Tensor, slots: Tensor, positions: Tensor, words: BadWords, history: AnyHistory
) -> tuple[Tensor, Tensor]:
    """The last tokens of a request's bad words, int64 ``[R, W]``, and their logits: -inf where the rest was drawn."""
    slot, place, is_edited = list_entries(slots, words.counts, words.token_ids)
    word = words.token_ids[slot[:, None], place]  # [R, W, M]
    start = word[..., :-1]
    held = last_tokens(texts_of(history, slots), positions, history, start.shape[2], words.prompt_lens[slot][:, None])
    # UNWRITTEN in a start stands for any token
    begun = ((start == UNWRITTEN) | (start == held[:, None, :])).all(-1)  # [R, W]
    ids = word[..., -1].clamp(min=0).to(torch.int64)
    is_masked = ((ids[:, :, None] == ids[:, None, :]) & begun[:, None, :]).any(-1)
    before = x.gather(1, ids)
    return ids, torch.where(is_masked & is_edited, _MASKED, before)


def checked_words(name: str, values: object) -> tuple[tuple[int, ...], ...]:
    """Sequences of token ids, none of them empty, each once."""
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of sequences of ints, got {values!r}; [[id, ...]]")
    words = []
    for each in values:
        if isinstance(each, str | bytes | Mapping | Set) or not isinstance(each, Iterable):
            raise TypeError(f"each of {name} must be a sequence of ints, got {each!r}; [[id, ...]]")
        words.append(tuple(checked_token_id(name, token) for token in each))
        if not words[-1]:
            raise ValueError(f"each of {name} must have a token, got an empty one; leave it out")
    return tuple(dict.fromkeys(words))


def _entries(params: Params, row: SlotRow) -> np.ndarray:
    """The words, int32 ``[W, M]``."""
    made = np.full((row.sizes.bad_words, row.sizes.bad_word_len), UNWRITTEN, np.int32)
    for entry, word in zip(made, params.bad_words_token_ids, strict=False):
        entry[-len(word) :] = word
    return made


BAD_WORDS = EditSpec(
    name="bad_words",
    kind="list",
    parameters={
        "bad_words_token_ids": Parameter(checked_words, in_vllm=True),
        "bad_words_scope": Parameter(check_scope),
    },
    wanted=lambda params: bool(params.bad_words_token_ids),
    entries={
        "bad_words": lambda params: len(params.bad_words_token_ids),
        "bad_word_len": lambda params: max(map(len, params.bad_words_token_ids), default=0),
    },
    named_ids={"bad_words_token_ids": lambda params: [token for word in params.bad_words_token_ids for token in word]},
    table=BadWords,
    columns={
        "counts": Column(lambda params, row: len(params.bad_words_token_ids)),
        "token_ids": Column(
            _entries, off=UNWRITTEN, shape=lambda sizes, vocab_size: (sizes.bad_words, sizes.bad_word_len)
        ),
        "prompt_lens": Column(lambda params, row: 0 if params.bad_words_scope == "all" else row.prompt_len),
    },
    reads_history=True,
)
