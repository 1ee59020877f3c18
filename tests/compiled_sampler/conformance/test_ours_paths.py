"""A path that says it replays is refused where it does not, and every path names what it is."""

from collections import Counter
from types import SimpleNamespace

import pytest

from compiled_sampler.conformance.adapters.ours_paths import served_by_graphs


def call(replays, direct_runs):
    """A call that is counted as a sampler counts."""
    counts = Counter(replays=7, direct_runs=7)
    sampler = SimpleNamespace(statistics=lambda: SimpleNamespace(**counts))
    with served_by_graphs(sampler):
        counts.update(replays=replays, direct_runs=direct_runs)


def test_what_graphs_serve_passes():
    call(replays=3, direct_runs=0)


@pytest.mark.parametrize(("replays", "direct_runs"), [(0, 0), (0, 2), (5, 1)])
def test_a_call_that_no_graph_served_is_an_error(replays, direct_runs):
    with pytest.raises(RuntimeError, match=f"got {replays} replays and {direct_runs} direct runs"):
        call(replays, direct_runs)
