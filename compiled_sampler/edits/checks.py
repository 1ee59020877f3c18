"""Checks of parameters that several edits have, each from what a caller gave to what is stored; and ``extra_args``."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from compiled_sampler.scalars import check_choice, checked_float, checked_int

MAX_TOKEN_ID = 2**31 - 2
SCOPES = ("all", "output")
"""The tokens that a parameter looks at: those of the prompt and those that were drawn, or the latter alone."""


def checked_token_ids(name: str, values: object) -> tuple[int, ...]:
    """Token ids as a tuple of Python ints, each once, in the order in which they came."""
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of ints, got {values!r}; [id, ...]")
    return tuple(dict.fromkeys(checked_token_id(name, each) for each in values))


def checked_token_id(name: str, value: object) -> int:
    """A token id as a Python int."""
    found = checked_int(name, value, "token ids are Python ints")
    if not 0 <= found <= MAX_TOKEN_ID:
        raise ValueError(f"{name} must be >= 0 and below the vocabulary's size, got {found}; leave it out")
    return found


def in_range(text: str, holds: Callable[[float], bool], way_out: str) -> Callable[[str, object], float]:
    """A check of a parameter that is a number, stored as a Python float; ``text`` is the range as errors have it."""

    def check(name: str, value: object) -> float:
        number = checked_float(name, value)
        _check_holds(name, number, text, holds, way_out)
        return number

    return check


def count_in_range(text: str, holds: Callable[[float], bool], way_out: str) -> Callable[[str, object], int]:
    """A check of a parameter that counts tokens, stored as a Python int; arguments and errors as ``in_range``."""

    def check(name: str, value: object) -> int:
        count = checked_int(name, value)
        _check_holds(name, count, text, holds, way_out)
        return count

    return check


def _check_holds(name: str, number: float, text: str, holds: Callable[[float], bool], way_out: str) -> None:
    if not holds(number):
        raise ValueError(f"{name} must be {text}, got {number}; {way_out}")


def checked_flag(name: str, value: object, way_out: str) -> bool:
    """A bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}; {way_out}")
    return value


def check_scope(name: str, value: object) -> object:
    """A scope, which is "all" or "output"."""
    check_choice(name, value, SCOPES, "'all' looks at the prompt too")
    return value


def checked_extra_args(values: object) -> tuple[tuple[str, Any], ...]:
    """What a request sets for edits of the user, as pairs by name: a dataclass as it is, or pairs of the parameters."""
    way_out = "{name: {parameter: number}}"
    pairs = values.items() if isinstance(values, Mapping) else () if values is None else values
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise TypeError(f"extra_args must map names of edits to parameters, got {values!r}; {way_out}")
    made = dict[str, Any]()
    for pair in pairs:
        name, given = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
        if not isinstance(name, str) or name in made:
            raise TypeError(f"extra_args must map each name of an edit to parameters, got {values!r}; {way_out}")
        made[name] = _checked_args(name, given)
    return tuple(sorted(made.items(), key=lambda pair: pair[0]))


def _checked_args(name: str, given: object) -> Any:
    """Parameters of one edit in a form that has a hash."""
    if dataclasses.is_dataclass(given) and not isinstance(given, type) and type(given).__hash__ is not None:
        return given
    if isinstance(given, Mapping):
        given = tuple(given.items())
    if not isinstance(given, tuple) or not all(isinstance(each, tuple) and len(each) == 2 for each in given):
        raise TypeError(
            f"extra_args of {name} must be a mapping or a frozen dataclass, got {given!r}; {{}} if it has no parameters"
        )
    keys = [key for key, _ in given]
    for key, value in given:
        if not isinstance(key, str) or keys.count(key) > 1:
            raise TypeError(f"extra_args of {name} must name each parameter once, by a str, got {key!r}")
        if not isinstance(value, numbers.Real | np.bool_):
            raise TypeError(f"{key} of {name} must be a number, got {value!r}; a float, an int or a bool")
    return tuple(sorted(given))
