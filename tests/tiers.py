"""Which cases of a product the first tier runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_full(cases: Iterable[Any], *first: Any) -> list[Any]:
    """Cases for ``parametrize``, of which all but ``first`` are marked ``full``; a tuple has a value an argument."""
    listed = list(cases)
    assert all(case in listed for case in first), "no such case"
    return [
        pytest.param(*(case if type(case) is tuple else (case,)), marks=() if case in first else pytest.mark.full)
        for case in listed
    ]


def full_argument(request: pytest.FixtureRequest) -> list[str]:
    """``--full`` for the program that computes what the tests of a file share, if one that runs is marked ``full``."""
    items = request.session.items
    is_full = any(item.path == request.path and item.get_closest_marker("full") for item in items)
    return ["--full"] if is_full else []
