"""The mode of a call: it covers its numbers and whatever its tensors may hold, and no cheaper one does."""

import itertools

import pytest

from compiled_sampler.functional.arguments import mode_of
from compiled_sampler.modes import mode_table, uncovered
from compiled_sampler.params import SamplingParams

VALUES: tuple[tuple[float, ...], ...] = ((0.0, 0.8), (0, 1, 2, 64, 65, 127, 128, 200), (0.5, 1.0), (0.0, 0.1))
NUMBERS = [*itertools.product(*((None, *values) for values in VALUES))]


@pytest.mark.parametrize("vocab_size", [1, 2, 40, 64, 128])
def test_the_cheapest_mode_that_covers_every_row_that_there_can_be(vocab_size):
    table = mode_table(vocab_size, "top_k")
    for filters in NUMBERS:
        held = [values if given is None else (given,) for given, values in zip(filters, VALUES, strict=True)]
        requests = [SamplingParams(heat, int(k), p, least, seed=0) for heat, k, p, least in itertools.product(*held)]
        wanted = next(mode for mode in table if not any(uncovered(mode, params) for params in requests))
        assert mode_of(None, filters, vocab_size, "top_k") == wanted


@pytest.mark.parametrize(
    ("filters", "name"),
    [
        ((None, 0, 1.0, 0.0), "no_filter"),
        ((1.0, 0, 1.0, None), "min_p"),
        ((None, 50, None, None), "top_k_top_p[64]"),
        ((1.0, None, 1.0, 0.0), "top_k"),
        ((1.0, None, None, 0.0), "full"),
        ((0.0, None, None, None), "greedy"),
    ],
)
def test_tensors_need_no_more_than_they_can_hold(filters, name):
    assert mode_of(None, filters, 1000, "top_k").name == name


def test_numbers_that_a_named_mode_does_not_cover_raise():
    with pytest.raises(ValueError, match=r"mode 'no_filter' must cover the parameters, but min_p 0.1 is applied; None"):
        mode_of("no_filter", (1.0, 0, 1.0, 0.1), 100, "top_k")


def test_an_unknown_mode_raises():
    with pytest.raises(ValueError, match=r"mode must be one of \('greedy', .*, 'full'\), got 'fast'; None chooses"):
        mode_of("fast", (1.0, 0, 1.0, 0.0), 100, "top_k")
