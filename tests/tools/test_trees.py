"""Tokens a step with trees: the rounds of rejection keep the target's law, and steps are counted as they are taken."""

import numpy as np
import pytest

from tools.trees import judge, nodes, tokens_per_step


@pytest.mark.parametrize("width", [1, 3])
def test_rounds_of_rejection_keep_the_law(width):
    source, p, q = np.random.default_rng(1), np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.2, 0.7])
    drawn = [judge(p, q, width, source)[0] for _ in range(20_000)]
    assert np.abs(np.bincount(drawn, minlength=3) / len(drawn) - p).max() < 0.015  # 4 standard deviations


def test_steps_end_where_no_draft_is_the_token():
    places = np.array([[0, 1, 4, 0, 0, 0, 4, 1, 4]])
    assert tokens_per_step(places, 1, 1, "full") == pytest.approx((2 + 1 + 2 + 2 + 1) / 5)
    assert tokens_per_step(places, 2, 2, "full") == pytest.approx((3 + 3 + 1) / 3)
    assert tokens_per_step(np.array([[1, 0, 0, 4, 4]]), 2, 2, "full") == 3.0
    assert tokens_per_step(np.array([[1, 0, 0, 4, 4]]), 2, 2, "comb") == 2.0
    assert (nodes(2, 5, "full"), nodes(2, 5, "comb")) == (62, 10)
