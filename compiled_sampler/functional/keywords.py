"""Keywords that the functions do not have, and where there is what they mean: edits, filters of rows, logprobs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from compiled_sampler.engine.sampler import Sampler
from compiled_sampler.params import SamplingParams

Given = ParamSpec("Given")
Made = TypeVar("Made")

_OF_REQUESTS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_OF_CALLS = frozenset(name for each in (Sampler.sample, Sampler.verify) for name in inspect.signature(each).parameters)
_OF_SAMPLERS = frozenset(inspect.signature(Sampler).parameters)


def known_keywords(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """The function, which names the way out of a keyword that it does not have, with the same signature."""
    names = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: Given.args, **given: Given.kwargs) -> Made:
        if not given.keys() <= names:
            unknown = next(name for name in given if name not in names)
            raise TypeError(
                f"{function.__name__}() must get keywords of its own, got {unknown!r}; {_way_out(unknown, names)}"
            )
        return function(*args, **given)

    return checked


def _way_out(name: str, names: frozenset[str]) -> str:
    """Where a keyword is to be had.

    Args:
        name: of the keyword.
        names: of the keywords that the function has.
    """
    if f"{name}s" in names:
        return f"{name}s=... has one a row"
    if name in _OF_REQUESTS:
        return f"a request of a Sampler has it: add_request(SamplingParams({name}=...))"
    if name in _OF_CALLS:
        return f"a call of a Sampler has it: sample or verify(plan, ..., {name}=...)"
    if name in _OF_SAMPLERS:
        return f"a Sampler has it: Sampler({name}=...)"
    return f"these are: {', '.join(sorted(names))}"
