"""A path of a comparison that says it replays, and does."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from compiled_sampler import Sampler

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def replaying(sampler: Sampler, path: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The path, unless it makes calls of the sampler that no graph served.

    Args:
        sampler: with the backend "graph", after its warm-up.
        path: makes calls of it.

    Raises:
        RuntimeError: by what is returned; a call was not served by a graph, or there was none.
    """

    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        before = sampler.statistics()
        made = path(*args, **kwargs)
        after = sampler.statistics()
        replays, others = after.replays - before.replays, after.direct_runs - before.direct_runs
        if others or not replays:
            raise RuntimeError(f"graphs must serve every call, got {replays} replays and {others} direct runs")
        return made

    return run
