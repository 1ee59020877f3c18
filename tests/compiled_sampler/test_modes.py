"""Modes: which requests a mode covers, and that the table reaches from the cheapest to one that covers all."""

import pytest

from compiled_sampler.modes import CAPACITIES, Mode, includes, uncovered
from compiled_sampler.params import SamplingParams
from tests.builders.inputs import covering_modes, modes_by_name

V = 1000


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 9])
def test_includes_says_what_a_look_at_every_request_says(vocab_size):
    requests = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for temperature in (0.0, 0.7)
        for top_k in range(vocab_size + 3)
        for top_p in (0.3, 1.0)
        for min_p in (0.0, 0.2)
    ]
    flags = [(draws, min_p, wide) for draws in (False, True) for min_p in (False, True) for wide in (False, True)]
    modes = [
        Mode("test", vocab_size, draws=draws, filters_min_p=min_p, beyond_candidates=wide, capacity=capacity)
        for draws, min_p, wide in flags
        for capacity in (0, 1, 3, 6)
    ]
    covered = {mode: {i for i, request in enumerate(requests) if uncovered(mode, request) is None} for mode in modes}
    for mode in modes:
        for other in modes:
            assert includes(mode, other) == (covered[other] <= covered[mode])


def test_the_first_mode_that_covers_a_request_is_the_cheapest():
    first = {
        "greedy": [SamplingParams(temperature=0.0), SamplingParams(top_k=1, top_p=0.5, min_p=0.5)],
        "no_filter": [SamplingParams(), SamplingParams(top_k=V), SamplingParams(top_k=V + 5)],
        "min_p": [SamplingParams(min_p=0.1)],
        f"top_k_top_p[{CAPACITIES[0]}]": [SamplingParams(top_k=CAPACITIES[0], top_p=0.9, min_p=0.1)],
        "top_k": [SamplingParams(top_k=CAPACITIES[0] + 1), SamplingParams(top_k=V - 1, min_p=0.1)],
        "full": [SamplingParams(top_p=0.9), SamplingParams(top_k=CAPACITIES[0] + 1, top_p=0.9)],
    }
    assert [*first] == [*modes_by_name(V)]
    for name, requests in first.items():
        assert [covering_modes([p], V)[0].name for p in requests] == [name] * len(requests)


def test_top_k_of_any_size_goes_with_rows_that_it_leaves_whole():
    for others in (
        [SamplingParams()],
        [SamplingParams(min_p=0.1)],
        [SamplingParams(top_k=50)],
        [SamplingParams(top_k=900)],
    ):
        batch = [SamplingParams(top_k=500), SamplingParams(temperature=0.0), *others]
        assert covering_modes(batch, V)[0].name == "top_k"
    assert covering_modes([SamplingParams(top_k=500), SamplingParams(top_k=5, top_p=0.9)], V)[0].name == "full"
