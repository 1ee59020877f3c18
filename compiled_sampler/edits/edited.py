"""The pass that makes the edited copy of the logits, with masks, biases and penalties in it.

Both edits of lists read the logits of the caller, not the copy, so each is one kernel on a GPU, which computes changes
and adds them to the copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compiled_sampler.edit_tables import AllowedIds, BiasLists, History, Penalties
from compiled_sampler.edits.bias import bias_changes
from compiled_sampler.edits.changes import Changes, LogitsBefore, add_changes
from compiled_sampler.edits.masks import masked_bits, row_words
from compiled_sampler.edits.penalties import penalty_changes


def edited_bits(
    logits: Tensor,
    token_bitmask: Tensor | None,
    allowed: AllowedIds | None,
    slots: Tensor,
    bias: BiasLists | None,
    positions: Tensor,
    penalties: Penalties | None,
    history: History | None,
    *,
    vocab_size: int,
) -> Tensor:
    """The bits of the logits after masks, biases and penalties, int32 ``[R, V]`` in new memory.

    Their view in float32 is the caller's: inside of a stage Inductor leaves it to ATen.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        token_bitmask: int32 ``[R, >= ceil(V / 32)]``, by row; None for no mask.
        allowed: by slot; None if every token is.
        slots: int64 ``[R]``; -1 for padding.
        bias: by slot; None for none.
        positions: int64 ``[R]``, of the token to draw.
        penalties: by slot; None for none.
        history: by slot; given if penalties are.
        vocab_size: V.
    """
    words = row_words(token_bitmask, slots, allowed, vocab_size=vocab_size)
    bits = masked_bits(logits, words, vocab_size=vocab_size)
    before = LogitsBefore(logits, words)
    for changes in _changes(before, slots, bias, positions, penalties, history, vocab_size):
        add_changes(bits, changes)
    return bits


def edited_tokens(
    logits: Tensor,
    slots: Tensor,
    bias: BiasLists | None,
    positions: Tensor,
    penalties: Penalties | None,
    history: History | None,
    *,
    vocab_size: int,
) -> Changes:
    """What biases and penalties change in float32 logits that no mask acts on: ``[R, n]``; arguments as above."""
    before = LogitsBefore(logits, None)
    made = [*_changes(before, slots, bias, positions, penalties, history, vocab_size)]
    return Changes(torch.cat([each.token_ids for each in made], 1), torch.cat([each.added for each in made], 1))


def _changes(
    before: LogitsBefore,
    slots: Tensor,
    bias: BiasLists | None,
    positions: Tensor,
    penalties: Penalties | None,
    history: History | None,
    vocab_size: int,
) -> Iterator[Changes]:
    """The changes of each edit, in the order in which they act."""
    if bias is not None:
        yield bias_changes(before, slots, bias, vocab_size=vocab_size)
    if penalties is not None and history is not None:
        yield penalty_changes(before, slots, bias, positions, penalties, history, vocab_size=vocab_size)
