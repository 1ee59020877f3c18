"""A path that says it replays is refused where it does not."""

from collections import Counter
from types import SimpleNamespace

import pytest

from tools.exactness.replays import replaying


def path_of(counts: Counter):
    """A path that counts calls as a sampler does, and says which."""
    sampler = SimpleNamespace(statistics=lambda: SimpleNamespace(**{"replays": 0, "direct_runs": 0, **counts}))
    return replaying(sampler, lambda **calls: counts.update(calls) or calls)


def test_what_graphs_served_is_returned():
    path = path_of(Counter())
    assert path(replays=3, direct_runs=0) == {"replays": 3, "direct_runs": 0}
    assert path(replays=1) == {"replays": 1}


@pytest.mark.parametrize(("replays", "direct_runs"), [(0, 0), (0, 2), (5, 1)])
def test_a_call_that_no_graph_served_is_an_error(replays, direct_runs):
    with pytest.raises(RuntimeError, match=f"got {replays} replays and {direct_runs} direct runs"):
        path_of(Counter(replays=7, direct_runs=7))(replays=replays, direct_runs=direct_runs)
