"""Which cases of a product run in the first tier of the suite."""

from collections.abc import Iterable
from typing import Any

import pytest


def tiers(first: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """Values of ``pytest.mark.parametrize``: some as they are, and the others of all marked ``full``."""
    chosen = list(first)
    others = [value if isinstance(value, tuple) else (value,) for value in every if value not in chosen]
    return [*chosen, *(pytest.param(*values, marks=pytest.mark.full) for values in others)]
