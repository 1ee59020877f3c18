"""Sampling parameters out of what other libraries hold: a GenerationConfig of transformers, a request body of OpenAI's.

Both functions return keyword arguments of ``SamplingParams``, which checks their values. A field that is set and that a
sampler cannot honour is an error that names it, by the checks that stand here. Modules::

    generation_config  fields of a GenerationConfig
    openai_body        fields of a request body
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any


def check_refused(holder: Any, refused: Mapping[str, tuple[tuple[object, ...], str]]) -> None:
    """Raise unless fields ask for nothing, each with the values that do and a way out."""
    for name, (values, way_out) in refused.items():
        check_neutral(holder, {name: values}, way_out)


def check_neutral(holder: Any, neutral: Mapping[str, tuple[object, ...]], way_out: str) -> None:
    """Raise unless fields have values that ask for nothing; all have one way out."""
    for name, values in neutral.items():
        value = value_of(holder, name, None)
        if value is not None and value not in values and _as_tuple(value) not in values:
            meant = " or ".join(repr(each) for each in values if each != ()) or "None"
            raise ValueError(f"{name} must be {meant} here, got {value!r}; {way_out}")


def _as_tuple(value: object) -> object:
    """A list as a tuple, so that it compares with one; another value as it is."""
    return tuple(value) if isinstance(value, list) else value


def check_known(names: Iterable[str], holder: Any, known: Collection[str], way_out: str) -> None:
    """Raise where a field is set that nobody reads."""
    unread = sorted((name for name in names if name not in known and value_of(holder, name, None) is not None), key=str)
    if unread:
        raise ValueError(f"{unread[0]} must be left out, got {value_of(holder, unread[0], None)!r}; {way_out}")


def value_of(holder: Any, name: str, default: Any) -> Any:
    """A field of an object or a mapping; the default where it is missing or None."""
    found = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
    return default if found is None else found
