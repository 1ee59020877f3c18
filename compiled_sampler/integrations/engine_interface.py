"""What an adapter calls and makes of an engine, compared with the engine that is installed."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from importlib import import_module
from typing import Any, NamedTuple

Find = Callable[[str], Any]
"""Gives what a name such as ``module:Class.method`` stands for; LookupError where there is none."""
Names = tuple[str, ...]


class Interface(NamedTuple):
    """What an adapter expects of an engine, by names such as ``module:Class.method``."""

    parameters: Mapping[str, Names] = {}
    """Functions that are replaced or called, with all their parameters."""
    passed: Mapping[str, Names] = {}
    """Functions that are replaced or called, with some of their parameters."""
    returns: Mapping[str, str] = {}
    """Annotations of what a replaced function returns."""
    fields: Mapping[str, Names] = {}
    """Records that are read or made, with the fields that are."""
    attributes: Mapping[str, Names] = {}
    """Methods, with names that stand in their code: attributes of an engine's classes, which do not declare theirs."""


class Supported(NamedTuple):
    """Which versions of an engine an adapter fits: by number, and by what it calls and what it makes."""

    engine: str  # its name, as errors have it
    oldest: str
    way_out: str  # what to install instead of another version
    interface: Interface

    def check(self, version: str, find: Find | None = None) -> None:
        """Raise ImportError unless the adapter fits a version; without ``find``, of what is installed."""
        if numbers(version) < numbers(self.oldest):
            raise ImportError(f"{self.engine} must be {self.oldest} or newer, got {version}; {self.way_out}")
        differing = differences(self.interface, find or found)
        if differing:
            lacks = f"{self.engine} must have {differing[0]}, got {version}, where it differs"
            raise ImportError(f"{lacks}; {self.way_out}")


def differences(interface: Interface, find: Find) -> list[str]:
    """The names of what is called or made that an engine does not have as it is expected."""
    signature, unwrap = inspect.signature, inspect.unwrap
    tables: list[tuple[Mapping[str, Any], Callable[[Any, Any], bool]]] = [
        (interface.parameters, lambda function, wanted: tuple(signature(function).parameters) == wanted),
        (interface.passed, lambda function, wanted: set(wanted) <= set(signature(function).parameters)),
        (interface.returns, _returns),
        (interface.fields, _has_fields),
        (interface.attributes, lambda method, names: not names or set(names) <= set(unwrap(method).__code__.co_names)),
    ]
    return [name for table, check in tables for name, wanted in table.items() if not _holds(find, name, check, wanted)]


def found(name: str) -> Any:
    """What ``module:Class.method`` stands for in the engine that is installed; LookupError where it has no such name.

    What an import of the engine raises otherwise is its own fault, and is let through.
    """
    module, _, path = name.partition(":")
    try:
        thing = import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # some module that the engine itself asks for
            raise
        raise LookupError(name) from error
    for part in path.split("."):
        if not hasattr(thing, part):
            raise LookupError(name)
        thing = getattr(thing, part)
    return thing


def wrapped(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> tuple[Any, str, Any]:
    """Put what ``make`` gives for a method ``module:Class.method`` in its place: its class, its name, what it was."""
    owner, _, method = name.rpartition(".")
    kind = found(owner)
    original = getattr(kind, method)
    setattr(kind, method, functools.wraps(original)(make(original)))
    return kind, method, original


@contextmanager
def ends_process(variable: str) -> Iterator[None]:
    """End the process where an adapter cannot be switched on, as its environment variable asks."""
    try:
        yield
    except (ImportError, ValueError) as error:
        # An engine that goes on behind an exception of a plugin would draw by a sampler that nobody asked for.
        raise SystemExit(f"{variable} is set, but {error}") from error


def numbers(version: str) -> tuple[int, int, int]:
    """The first three numbers of a version; zeros for what is no number, such as ``dev``."""
    parts = [*version.split("."), "", "", ""][:3]
    first, second, third = (int(part) if part.isdecimal() else 0 for part in parts)
    return first, second, third


def _holds(find: Find, name: str, check: Callable[[Any, Any], bool], wanted: Any) -> bool:
    try:
        thing = find(name)
    except LookupError:
        return False
    try:
        return check(thing, wanted)
    except AttributeError:  # a thing of another kind
        return False


def _returns(function: Any, wanted: str) -> bool:
    annotation = inspect.signature(function).return_annotation
    return bool(getattr(annotation, "__name__", annotation) == wanted)


def _has_fields(record: Any, wanted: Names) -> bool:
    if dataclasses.is_dataclass(record):
        return set(wanted) <= {field.name for field in dataclasses.fields(record)}
    return set(wanted) <= set(getattr(record, "__struct_fields__", ()) or record._fields)


def seed_of(request_id: str, salt: int) -> int:
    """The seed of a request without one, in [0, 2**64): of its unique id, the same on every rank and in every batch."""
    return int.from_bytes(blake2b(f"{salt}/{request_id}".encode(), digest_size=8).digest(), "little")
