"""Checks of the edits that a user wrote, and of what requests set for them: rule, value, way out."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.edits.names import EDITS
from compiled_sampler.logit_edit import INPUT_DTYPES, MOST_EDITS, EditInput, EditRows, EditState, LogitEdit, name_of
from compiled_sampler.lowering.inductor.compilation import reader_of_numbers, without_numbers
from compiled_sampler.scalars import checked_float, checked_int

_ROWS = 2  # of the trial of an edit
_METHODS = "edit", "tables", "state"  # of an edit, whose names no field of it may take
_KINDS = {float: True, int: False, bool: False}  # types of parameters, and whether they are floats


def checked_custom_edits(edits: Iterable[LogitEdit], vocab_size: int, history_len: int) -> tuple[LogitEdit, ...]:
    """The edits of the user as a tuple, each of which declares what can be served and returns logits."""
    if isinstance(edits, LogitEdit) or not isinstance(edits, Iterable):
        raise TypeError(f"edits must be a list of LogitEdit, got {type(edits).__name__}; edits=[MyEdit()]")
    instances = tuple(edits)
    if len(instances) > MOST_EDITS:
        raise ValueError(f"edits must be at most {MOST_EDITS}, got {len(instances)}; join some in one function")
    names, inputs, states = list(EDITS), list[str](), list[str]()
    for edit in instances:
        _check_declared(edit, history_len)
        uses = [(names, [name_of(edit)], "name"), (inputs, [*edit.inputs], "input")]
        for known, new, what in (*uses, (states, [*checked_states(edit, vocab_size)], "state")):
            twice = [name for name in new if name in known]
            if twice:
                raise ValueError(f"each {what} of edits must be used once, got {twice[0]!r} twice; name it otherwise")
            known += new
        check_result(edit, vocab_size)
    return instances


def _check_declared(edit: LogitEdit, history_len: int) -> None:
    """Raise unless the declarations of an edit are of their kinds."""
    if not isinstance(edit, LogitEdit):
        raise TypeError(f"each of edits must be a LogitEdit, got {edit!r}; an instance of a class derived from it")
    name, made_by = name_of(edit), getattr(edit, "__dataclass_params__", None)
    if made_by is None or not made_by.frozen:
        raise TypeError(
            f"edit {name} must be a frozen dataclass, since compiled code holds its fields; @dataclass(frozen=True)"
        )
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name of an edit must be an identifier, got {name!r}; name = 'my_edit'")
    if not isinstance(edit.bit_exact, bool):
        raise TypeError(f"bit_exact of {name} must be a bool, got {edit.bit_exact!r}; False promises nothing")
    for method in _METHODS:
        if not callable(value := getattr(edit, method)):
            raise TypeError(
                f"{method} of {name} must be the method of LogitEdit, got {value!r}; name the field otherwise"
            )
    count = checked_int(f"history_tokens of {name}", edit.history_tokens)
    if not 0 <= count <= history_len:
        raise ValueError(
            f"history_tokens of {name} must be in [0, history_len {history_len}], got {count}; Sampler(history_len=...)"
        )
    _check_inputs(edit, name)
    param_kinds(edit)


def _check_inputs(edit: LogitEdit, name: str) -> None:
    """Raise unless the tensors that come with a call are declared by name."""
    if not isinstance(edit.inputs, Mapping):
        raise TypeError(f"inputs of {name} must map names to EditInput, got {edit.inputs!r}; {{'mask': EditInput()}}")
    for key, spec in edit.inputs.items():
        if not isinstance(spec, EditInput) or not isinstance(key, str):
            raise TypeError(
                f"inputs of {name} must map names to EditInput, got {key!r}: {spec!r}; EditInput(torch.bool)"
            )
        if spec.dtype not in INPUT_DTYPES:
            raise ValueError(f"dtype of input {key} of {name} must be one of {INPUT_DTYPES}, got {spec.dtype}")


def param_kinds(edit: LogitEdit) -> tuple[tuple[str, bool], ...]:
    """The name of each parameter of a request, and whether it is a float."""
    kind = edit.params
    if kind is None:
        return ()
    name, way_out = name_of(edit), "@dataclass(frozen=True) with fields of these types"
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"params of {name} must be a frozen dataclass, got {kind!r}; {way_out}")
    try:
        types = _field_types(kind)
    except NameError as error:
        raise TypeError(f"params of {name} must have types that are known, got {error}; {way_out}") from error
    for field in dataclasses.fields(kind):
        if types[field.name] not in _KINDS:
            raise TypeError(
                f"params of {name} must be float, int or bool, got {field.name}: {types[field.name]}; {way_out}"
            )
    return tuple((field.name, _KINDS[types[field.name]]) for field in dataclasses.fields(kind))


@functools.lru_cache(maxsize=256)
def _field_types(kind: type) -> dict[str, Any]:
    """The types of the fields of a dataclass by name; looked up once, as each request with the edit asks."""
    return typing.get_type_hints(kind)


def checked_request(edit: LogitEdit, request: Any) -> dict[str, float | int]:
    """The parameters of one request by name, an ``edit.params`` or pairs, as numbers that float32 and int64 hold."""
    name, kind = name_of(edit), edit.params
    if kind is None:
        if request != ():
            raise TypeError(f"{name} has no parameters, got {request!r}; extra_args={{{name!r}: {{}}}}")
        return {}
    if isinstance(request, tuple) and not isinstance(request, kind):
        unknown = [key for key, _ in request if key not in dict(param_kinds(edit))]
        if unknown:
            known = ", ".join(key for key, _ in param_kinds(edit))
            raise TypeError(
                f"{name} must be given parameters that {kind.__name__} has, got {unknown[0]!r}; it has {known}"
            )
        request = kind(**dict(request))  # its own checks, and a TypeError for what is missing
    if not isinstance(request, kind):
        raise TypeError(f"extra_args of {name} must be {kind.__name__} or a mapping, got {request!r}")
    types = _field_types(kind)
    keys = [field.name for field in dataclasses.fields(kind)]
    return {key: _checked_number(f"{key} of {name}", getattr(request, key), types[key]) for key in keys}


def _checked_number(name: str, value: Any, kind: type) -> float | int:
    if kind is not float:
        integer = int(value) if isinstance(value, bool) else checked_int(name, value)
        if kind is bool and integer not in (0, 1):
            raise ValueError(f"{name} must be a bool, got {integer}; True or False")
        if not -(2**63) <= integer < 2**63:
            raise ValueError(f"{name} must be in [-2**63, 2**63), got {integer}; it is an int64 on the device")
        return integer
    number = checked_float(name, value)
    with np.errstate(over="ignore"):
        rounded = np.float32(number)
    if math.isnan(number) or np.isinf(rounded) != math.isinf(number):
        raise ValueError(f"{name} must be a number that float32 holds, got {number}; it is a float32 on the device")
    return float(rounded) if abs(rounded) >= np.finfo(np.float32).tiny else 0.0


def checked_tables(edit: LogitEdit, vocab_size: int) -> dict[str, Tensor]:
    """The constants of an edit by name, ``[V]`` each."""
    tables, name = edit.tables(vocab_size), name_of(edit)
    if not isinstance(tables, Mapping):
        raise TypeError(f"tables of {name} must map names to tensors, got {type(tables).__name__}; {{name: tensor}}")
    for key, table in tables.items():
        if not isinstance(table, Tensor):
            raise TypeError(f"table {key!r} of {name} must be a torch.Tensor, got {type(table).__name__}")
        if table.shape != (vocab_size,) or table.dtype not in INPUT_DTYPES:
            wanted, shown = f"[{vocab_size}] of one of {INPUT_DTYPES}", f"{list(table.shape)} of {table.dtype}"
            raise ValueError(f"table {key!r} of {name} must be {wanted}, got {shown}; a number for each token")
    return {key: table.detach().clone(memory_format=torch.contiguous_format) for key, table in tables.items()}


def numbers_without(edit: LogitEdit) -> dict[str, float | int]:
    """What an edit reads for rows whose request does not have it: its parameters by default, 1 for others."""
    try:
        return checked_request(edit, tuple((name, 1) for name in without_default(edit)))
    except Exception:  # whatever a user's check raises where 1 is none of its numbers
        return {name: 1 for name, _ in param_kinds(edit)}


def without_default(edit: LogitEdit) -> list[str]:
    """The names of the parameters that each request with the edit must give."""
    declared, missing = () if edit.params is None else dataclasses.fields(edit.params), dataclasses.MISSING
    return [field.name for field in declared if field.default is missing and field.default_factory is missing]


def checked_states(edit: LogitEdit, vocab_size: int) -> dict[str, EditState]:
    """The tensors by slot that an edit declares, by name."""
    states, name = edit.state(vocab_size), name_of(edit)
    if not isinstance(states, Mapping):
        raise TypeError(f"state of {name} must map names to EditState, got {states!r}; {{'bias': EditState()}}")
    for key, spec in states.items():
        if not isinstance(spec, EditState) or not isinstance(key, str):
            raise TypeError(
                f"state of {name} must map names to EditState, got {key!r}: {spec!r}; EditState(torch.int32)"
            )
    return {key: _checked_state(f"state {key!r} of {name}", spec) for key, spec in states.items()}


def _checked_state(what: str, spec: EditState) -> EditState:
    """The state with its initial value as Python's own number; raise unless a tensor by slot can be made."""
    if spec.dtype not in INPUT_DTYPES:
        raise ValueError(f"dtype of {what} must be one of {INPUT_DTYPES}, got {spec.dtype}")
    if not isinstance(spec.per_token, bool) or not isinstance(spec.shape, tuple):
        raise TypeError(
            f"{what} must have per_token, a bool, and shape, a tuple, got {spec.per_token!r} and {spec.shape!r}"
        )
    if any(checked_int(f"shape of {what}", size) < 1 for size in spec.shape) or (spec.per_token and spec.shape):
        raise ValueError(
            f"shape of {what} must be of sizes above 0, and () with per_token, got {spec.shape}; leave out the slots"
        )
    return dataclasses.replace(spec, initial=_checked_initial(f"initial of {what}", spec.initial, spec.dtype))


def _checked_initial(what: str, initial: Any, dtype: torch.dtype) -> float | int | bool:
    """A number that a dtype holds, rounded if it is one of floats."""
    if dtype is torch.bool:
        if not isinstance(initial, bool | int) or initial not in (0, 1):
            raise ValueError(f"{what} must be a bool, got {initial!r}; True or False")
        return bool(initial)
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    number = checked_float(what, initial) if dtype.is_floating_point else checked_int(what, initial)
    if not (limits.min <= number <= limits.max or abs(number) == math.inf):
        raise ValueError(f"{what} must be a number that {dtype} holds, got {initial!r}; choose another dtype")
    return number


def check_result(edit: LogitEdit, vocab_size: int) -> None:
    """Raise unless an edit takes logits and returns logits, tried without numbers or memory."""
    name = name_of(edit)
    with torch.inference_mode(False):  # whose tensors count writes
        tables = checked_tables(edit, vocab_size)
    with torch.inference_mode(False), without_numbers() as fake:
        x = torch.empty(_ROWS, vocab_size, dtype=torch.float32)
        ids = torch.empty(1, vocab_size, dtype=torch.int32)
        rows = EditRows(
            positions=torch.empty(_ROWS, 1, dtype=torch.int64),
            params={
                key: torch.empty(_ROWS, 1, dtype=torch.float32 if is_float else torch.int64)
                for key, is_float in param_kinds(edit)
            },
            inputs={
                key: torch.empty(_ROWS, vocab_size if spec.per_token else 1, dtype=spec.dtype)
                for key, spec in edit.inputs.items()
            },
            tables={key: fake(tensor)[None] for key, tensor in tables.items()},
            history=torch.empty(_ROWS, edit.history_tokens, dtype=torch.int32) if edit.history_tokens else None,
            state={
                key: torch.empty(_ROWS, *spec.of_row(vocab_size), dtype=spec.dtype)
                for key, spec in checked_states(edit, vocab_size).items()
            },
        )
        by_name = (*rows.params.values(), *rows.inputs.values(), *rows.tables.values(), *rows.state.values())
        history = () if rows.history is None else (rows.history,)
        read = [x, ids, rows.positions, *by_name, *history]
        versions = [tensor._version for tensor in read]
        try:
            result = edit.edit(x, ids, rows)
        except NotImplementedError:
            raise
        except Exception as error:
            if operator := reader_of_numbers(error):
                raise TypeError(
                    f"edit of {name} must not look at the numbers of a tensor, got {operator}; torch.where(condition, "
                    "a, b) instead of an if"
                ) from error
            raise TypeError(f"edit of {name} must take logits [R, V], got {type(error).__name__}: {error}") from error
        if [tensor._version for tensor in read] != versions:
            raise TypeError(
                f"edit of {name} must write into nothing that it is given, got a call in place; x + y, not x.add_(y)"
            )
    shown = type(result).__name__ if not isinstance(result, Tensor) else f"{result.dtype} {list(result.shape)}"
    if not isinstance(result, Tensor) or result.shape != x.shape or result.dtype is not torch.float32:
        raise TypeError(
            f"edit of {name} must return float32 of the shape of x, here [{_ROWS}, {vocab_size}], got {shown}"
        )
