"""Which cases of a product run in the first tier of the suite."""

from collections.abc import Iterable
from typing import Any

import pytest


def tiers(first: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """Values of ``pytest.mark.parametrize``: some as they are, and the others of all marked ``full``.

    A tuple has a value for each argument.
    """
    chosen = list(first)
    others = [value if type(value) is tuple else (value,) for value in every if value not in chosen]
    return [*chosen, *(pytest.param(*values, marks=pytest.mark.full) for values in others)]


def full_argument(request: pytest.FixtureRequest) -> list[str]:
    """``--full`` for the program that computes what the tests of a file share, if one that runs is marked ``full``."""
    items = request.session.items
    is_full = any(item.path == request.path and item.get_closest_marker("full") for item in items)
    return ["--full"] if is_full else []
