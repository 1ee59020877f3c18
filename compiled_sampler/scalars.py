"""Numbers and names that callers pass. Numbers of numpy are taken for what they hold, bools and texts are not."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from numbers import Integral, Real


def is_int(value: object) -> bool:
    """Whether a value is an integer of Python or numpy. A bool is none, and no tensor, whose value may need a sync."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def checked_int(name: str, value: object, way_out: str = "pass a Python int") -> int:
    """The value of an argument as a Python int; TypeError for what is none, with a way out."""
    if not is_int(value):
        raise TypeError(f"{name} must be an int, got {value!r}; {way_out}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def checked_float(name: str, value: object) -> float:
    """The value of an argument as a Python float: exactly what a numpy float of less precision holds."""
    if type(value) is float:
        return value  # found without a look at the registry of numbers, which takes a microsecond
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}; pass a Python float")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must fit a float, got a number beyond 1e308; pass a Python float") from None


def check_choice(name: str, value: object, choices: Collection[str], way_out: str) -> None:
    """Raise ValueError unless a value is one of a few names; the way out is told where none of them looks like it."""
    if isinstance(value, str) and value in choices:
        return
    for meant in difflib.get_close_matches(value.lower(), choices, n=1) if isinstance(value, str) else ():
        way_out = f"did you mean {meant!r}?"
    raise ValueError(f"{name} must be one of {tuple(choices)}, got {value!r}; {way_out}")


def as_int64(number: int) -> int:
    """The number in [-2**63, 2**63) that is the same modulo 2**64, so has the same 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
