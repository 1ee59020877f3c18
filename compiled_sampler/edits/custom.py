"""The pass that makes the edits of the user: masks before and after them, in one function of each row's tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compiled_sampler.batch import PickedRows
from compiled_sampler.core.order import indices, without_denormals
from compiled_sampler.core.stage import holds
from compiled_sampler.edits.allowed_token_ids import AllowedIds
from compiled_sampler.edits.history import AnyHistory, last_tokens, texts_of
from compiled_sampler.edits.masks import masked
from compiled_sampler.edits.tables import CustomTables
from compiled_sampler.logit_edit import CustomEdits, EditRows


@holds(tokens=True)
def customized(
    logits: Tensor | PickedRows,
    token_bitmask: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    allowed: AllowedIds | None,
    tables: CustomTables,
    given: tuple[Tensor, ...],
    history: AnyHistory | None,
    *,
    edits: CustomEdits,
    vocab_size: int,
) -> Tensor:
    """The logits after masks and, last, the edits of the user: float32 ``[R, V]`` in new memory; -inf stays -inf."""
    x = masked(logits, token_bitmask, slots, allowed, vocab_size=vocab_size)
    is_masked = x == float("-inf")
    ids = indices(vocab_size, x.device)[None]
    for number, (is_used, rows) in enumerate(edit_rows(edits, slots, positions, tables, given, history, vocab_size)):
        # what an edit makes a denormal is 0; rows without the edit keep all bits
        after = without_denormals(edits.edits[number].edit(without_denormals(x), ids, rows))
        x = torch.where(is_used, after, x)
    return torch.where(is_masked, float("-inf"), x)


def edit_rows(
    edits: CustomEdits,
    slots: Tensor,
    positions: Tensor,
    tables: CustomTables,
    given: tuple[Tensor, ...],
    history: AnyHistory | None,
    vocab_size: int,
) -> Iterator[tuple[Tensor, EditRows]]:
    """Which rows have an edit, bool ``[R, 1]``, and what it reads of them, for each edit."""
    slot, rest, tokens, states = slots.clamp(min=0), iter(given), iter(tables.tokens), iter(tables.states)
    numbers = tables.numbers.columns[slot]  # [R, n]
    for number, edit in enumerate(edits.edits):
        first = edits.starts[number]
        is_used = (numbers[:, first] != 0) & (slots >= 0)
        params = {}
        for place, (name, is_float) in enumerate(edits.params[number], start=first + 1):
            values = numbers[:, place : place + 1]
            params[name] = values.to(torch.int32).view(torch.float32) if is_float else values
        inputs = {name: by_row(next(rest))[:, :vocab_size] for name in edit.inputs}
        constants = {name: next(tokens) for name in edits.tables[number]}
        state = {name: by_row(next(states).values[slot]) for name in edits.states[number]}
        before = None
        if edit.history_tokens and history is not None:
            before = last_tokens(texts_of(history, slots), positions, history, edit.history_tokens)
        yield is_used[:, None], EditRows(positions[:, None], params, inputs, constants, before, state)


def by_row(values: Tensor) -> Tensor:
    """Numbers of rows as ``EditRows`` has them: ``[R]`` as ``[R, 1]``, others as they are."""
    return values[:, None] if values.dim() == 1 else values
