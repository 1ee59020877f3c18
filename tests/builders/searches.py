"""What the kernels of a search leave for each other, kept while the operators run."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def kept_searches(**constants: float) -> Iterator[list[Any]]:
    """The ``launches.Search`` of each search within, which is launched with these constants of ``launches``."""
    operators = importlib.import_module("compiled_sampler.exact.triton.operators")
    launches = importlib.import_module("compiled_sampler.exact.triton.operators")
    searches, empty = list[Any](), launches.empty_search

    def kept(*given: Any) -> Any:
        searches.append(empty(*given))
        return searches[-1]

    with mock.patch.object(operators, "empty_search", kept), mock.patch.dict(vars(launches), constants):
        yield searches
