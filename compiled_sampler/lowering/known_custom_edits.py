"""Numbers that the user's edits of known requests read: parameters, states and tensors of the call.

An edit gets only what it takes. Its parameters are made by its own dataclass, whose checks may refuse some. States and
tensors have numbers of their dtype if the edit, called on the CPU, raises nothing with them, as one would that looks
up an entry by them; else those of a request that begins, and zeros. An edit that takes neither is no request's, and so
is one that does not promise equal bits: nothing can be said of it.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.edit_tables import CustomTables, History, RequestNumbers, RequestState
from compiled_sampler.edits.custom import customized
from compiled_sampler.logit_edit import CustomEdits, LogitEdit
from compiled_sampler.lowering.known_requests import NUM_REQUESTS

_WIDE = 4.0  # of numbers drawn at random
_LARGEST, _SMALLEST = 1e30, 1e-30  # of the magnitudes of floats, so that none overflows and none is a denormal
_FIRST: Mapping[Any, tuple[Any, ...]] = {float: (0.5, 2.5, 1.0), int: (3, 1, 2), bool: (True, False)}
"""What is tried for parameters that have no default."""


class KnownCustom(NamedTuple):
    """What the user's edits of ``NUM_REQUESTS`` requests read, on the CPU."""

    tables: CustomTables
    """By request; constants by token as they were given."""
    given: tuple[Tensor, ...]
    """By request, ``[n, V]`` or ``[n]``, where a call has them by row."""


class _Of(NamedTuple):
    """The same of one edit."""

    columns: Tensor
    """int64 ``[n, k]``: 1 for requests that have it, then its parameters."""
    states: tuple[Tensor, ...]
    given: tuple[Tensor, ...]


def known_custom(
    edits: CustomEdits, like: CustomTables, given: tuple[Tensor, ...], history: History | None, vocab_size: int
) -> KnownCustom:
    """What the edits of a step read of known requests.

    Args:
        edits: which act.
        like: tables of a sampler, whose numbers every edit takes.
        given: tensors of a call, of which the same is said.
        history: of the known requests, on the CPU; None if no edit reads it.
        vocab_size: V.
    """
    columns = torch.zeros(NUM_REQUESTS, like.numbers.columns.shape[1], dtype=torch.int64)
    states, tensors, constants = iter(like.states), iter(given), iter(like.tokens)
    of_edits = list[_Of]()
    for number, edit in enumerate(edits.edits):
        taken = _taken(
            _alone(edits, number),
            tuple(next(constants).cpu() for _ in edits.tables[number]),
            tuple(_first_rows(next(states).values) for _ in edits.states[number]),
            tuple(_first_rows(next(tensors)) for _ in edit.inputs),
            history if edit.history_tokens else None,
            vocab_size,
        )
        columns[:, edits.starts[number] : edits.starts[number] + taken.columns.shape[1]] = taken.columns
        of_edits.append(taken)
    by_slot = tuple(RequestState(each) for taken in of_edits for each in taken.states)
    tables = CustomTables(RequestNumbers(columns), like.tokens, by_slot)
    return KnownCustom(tables, tuple(each for taken in of_edits for each in taken.given))


def _alone(edits: CustomEdits, number: int) -> CustomEdits:
    """One edit of several, as if a sampler had no other."""
    params, tables, states = edits.params[number], edits.tables[number], edits.states[number]
    return CustomEdits((edits.edits[number],), (0,), (params,), (tables,), (states,))


def _taken(
    alone: CustomEdits,
    constants: tuple[Tensor, ...],
    states: tuple[Tensor, ...],
    given: tuple[Tensor, ...],
    history: History | None,
    vocab_size: int,
) -> _Of:
    """Numbers that one edit takes, the boldest first; arguments as the fields of its tables, by request."""
    (edit,), (kinds,) = alone.edits, alone.params
    nothing = _Of(torch.zeros(NUM_REQUESTS, 1 + len(kinds), dtype=torch.int64), states, given)
    if not edit.bit_exact:
        return nothing
    columns = torch.tensor([_numbers(edit, kinds, request) for request in range(NUM_REQUESTS)], dtype=torch.int64)
    for made in (_Of(columns, _random(states, 1), _random(given, 2)), nothing._replace(columns=columns)):
        if _takes(alone, made, constants, history, vocab_size):
            return made
    return nothing


def _takes(
    alone: CustomEdits, made: _Of, constants: tuple[Tensor, ...], history: History | None, vocab_size: int
) -> bool:
    """Whether an edit raises nothing where its rows have these numbers."""
    tables = CustomTables(RequestNumbers(made.columns), constants, tuple(map(RequestState, made.states)))
    x, requests = torch.zeros(NUM_REQUESTS, vocab_size), torch.arange(NUM_REQUESTS)
    of_rows = None, requests, 3 * requests, None
    try:
        customized(x, *of_rows, tables, made.given, history, edits=alone, vocab_size=vocab_size)
    except Exception:  # whatever a user's function may raise
        return False
    return True


def _numbers(edit: LogitEdit, kinds: tuple[tuple[str, bool], ...], request: int) -> list[int]:
    """The numbers of a request as ``RequestNumbers`` has them, the first 0 for one that does not have the edit.

    Every third request does not, nor does any if the edit takes no parameters that are tried.
    """
    for turn in (request, *range(3)):
        try:
            made = None if edit.params is None else edit.params(**dict(_tried(edit.params, turn)))
            return [int(request % 3 != 1), *(_bits(getattr(made, name), is_float) for name, is_float in kinds)]
        except Exception:  # whatever a user's check may raise
            continue
    return [0] * (1 + len(kinds))


def _tried(params: type, turn: int) -> Iterator[tuple[str, Any]]:
    """The name of each parameter and a number for it: in turn 0 the default, if it has one, else others like it."""
    types = typing.get_type_hints(params)
    for field in dataclasses.fields(params):
        kind, default = types[field.name], field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        numbers = _FIRST[kind] if default is dataclasses.MISSING else _like(kind, default)
        if field.init:
            yield field.name, numbers[turn % len(numbers)]


def _like(kind: Any, default: Any) -> tuple[Any, ...]:
    if kind is bool:
        return default, not default
    return (default, default + 1, default - 1) if kind is int else (default, 0.5 * default, default + 0.25)


def _bits(value: Any, is_float: bool) -> int:
    """A parameter as an int64 holds it.

    Raises:
        ValueError: a number that is very large, or nearly 0.
    """
    if not is_float:
        return int(torch.tensor(value, dtype=torch.int64))
    if (value != 0 and not _SMALLEST < abs(value) < _LARGEST) or math.isnan(value):
        raise ValueError(f"{value} is no number to try")
    return int(np.float32(value).view(np.int32))


def _random(like: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    """Small numbers of the dtypes of others, of both signs; every other row is as it was."""
    generator, made = torch.Generator().manual_seed(seed), list[Tensor]()
    for each in like:
        values = _WIDE * torch.randn(each.shape, generator=generator)
        made.append(values > 0 if each.dtype is torch.bool else values.to(each.dtype))
        made[-1][1::2] = each[1::2]
    return tuple(made)


def _first_rows(values: Tensor) -> Tensor:
    """A row for each known request, those that there are in turn, on the CPU."""
    return values.detach()[torch.arange(NUM_REQUESTS, device=values.device) % values.shape[0]].cpu()
