"""Calls of an edit on hard rows, the same call at other columns or with fewer rows, and its graph of operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from compiled_sampler import EditInput, EditRows, EditState, LogitEdit
from compiled_sampler.core.order import without_denormals
from compiled_sampler.engine.boundary.edits import (
    checked_request,
    checked_states,
    checked_tables,
    param_kinds,
    without_default,
)
from compiled_sampler.logit_edit import name_of
from compiled_sampler.lowering.comparison import KINDS

_LARGE = 1e30
_MISSING = {float: 2.5, int: 3, bool: True}  # for a parameter without a default


class EditCall(NamedTuple):
    """The arguments of ``LogitEdit.edit``."""

    x: Tensor
    """float32 ``[R, n]``."""
    ids: Tensor
    """int32 ``[1, n]`` or ``[R, n]``."""
    rows: EditRows
    """What else it reads."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The call as nested tuples and dicts of tensors."""
        rows = self.rows
        by_name = rows.params, rows.inputs, rows.tables, rows.state
        return self.x, self.ids, rows.positions, *by_name, rows.history

    def to(self, device: str) -> EditCall:
        """The call on a device."""
        moved: EditCall = tree_map_only(Tensor, lambda each: each.to(device), self)
        return moved


def hard_call(edit: LogitEdit, params: Mapping[str, float | int], vocab_size: int) -> EditCall:
    """A call on a row of every hard kind and one of large numbers, without denormals, as a sampler makes it."""
    generator = torch.Generator().manual_seed(1)

    def made(spec: EditInput | EditState, *shape: int) -> Tensor:
        values = 4.0 * torch.randn(count, *shape, generator=generator)
        if spec.per_token and spec.dtype.is_floating_point:
            values = x.roll(1, 0)
        return values > 0 if spec.dtype is torch.bool else values.to(spec.dtype)

    count = len(KINDS) + 1
    x = hard_rows(vocab_size)
    inputs = {key: made(spec, vocab_size if spec.per_token else 1) for key, spec in edit.inputs.items()}
    declared = checked_states(edit, vocab_size)
    states = {key: made(spec, *spec.of_row(vocab_size)) for key, spec in declared.items()}
    for key, spec in declared.items():
        states[key][0] = spec.initial  # as of a request that begins
    numbers = checked_request(edit, request_of(edit, params))
    rows = EditRows(
        positions=torch.arange(count)[:, None] * 7 + 1,
        params={
            key: torch.full((count, 1), numbers[key], dtype=torch.float32 if is_float else torch.int64)
            for key, is_float in param_kinds(edit)
        },
        inputs=inputs,
        tables={key: table[None] for key, table in checked_tables(edit, vocab_size).items()},
        history=_history(count, edit.history_tokens, vocab_size) if edit.history_tokens else None,
        state=states,
    )
    return EditCall(without_denormals(x), torch.arange(vocab_size, dtype=torch.int32)[None], rows)


def hard_rows(vocab_size: int) -> Tensor:
    """A row of every kind of ``KINDS``, and one of both signs around 1e30: float32 ``[R, V]``."""
    noise = torch.randn(len(KINDS) + 1, vocab_size, generator=torch.Generator().manual_seed(2))
    return torch.stack([*(kind(row) for kind, row in zip(KINDS, noise[1:], strict=True)), _LARGE * noise[0]])


def request_of(edit: LogitEdit, params: Mapping[str, float | int]) -> Any:
    """What a request sets for the edit: these parameters, and some number for others without a default."""
    if edit.params is None:
        return ()
    kinds = dict(param_kinds(edit))
    given = dict(params)
    for name in without_default(edit):
        given.setdefault(name, _MISSING[float if kinds[name] else int])
    return tuple(given.items())


def _history(rows: int, tokens: int, vocab_size: int) -> Tensor:
    made = torch.randint(vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(4)).to(torch.int32)
    made[0] = -1  # a row that begins
    return made


def at_columns(edit: LogitEdit, call: EditCall, index: Tensor) -> EditCall:
    """The call for columns of each row, int64 ``[R, n]``."""

    def taken(values: Tensor) -> Tensor:
        return values.expand(len(index), -1).gather(1, index)

    rows = call.rows
    inputs = {key: taken(each) if edit.inputs[key].per_token else each for key, each in rows.inputs.items()}
    tables = {key: taken(each) for key, each in rows.tables.items()}
    declared = edit.state(call.x.shape[1])
    states = {key: taken(each) if declared[key].per_token else each for key, each in rows.state.items()}
    of_rows = EditRows(rows.positions, rows.params, inputs, tables, rows.history, states)
    return EditCall(taken(call.x), taken(call.ids), of_rows)


def row_alone(call: EditCall, row: int) -> EditCall:
    """The call for one row."""
    count = len(call.x)
    taken: EditCall = tree_map_only(Tensor, lambda each: each[row : row + 1] if len(each) == count else each, call)
    return taken


def traced(edit: LogitEdit, call: EditCall) -> GraphModule:
    """The operations of an edit, for tensors of such shapes and on such a device.

    Raises:
        TypeError: an edit that looks at the numbers of a tensor.
    """

    def function(
        x: Tensor, ids: Tensor, positions: Tensor, params: Any, inputs: Any, tables: Any, state: Any, history: Any
    ) -> Any:
        return edit.edit(x, ids, EditRows(positions, params, inputs, tables, history, state))

    try:
        made: GraphModule = make_fx(function)(*call.arguments)
    except Exception as error:
        raise TypeError(f"{name_of(edit)} must be a function that torch can trace, got {error}") from error
    return made
